"""Whole runs that learn from a teacher: the real command, from a folder, an engine and the policy itself."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from offbeat.config.root import Config
from offbeat.controller.inputs import read_inputs
from offbeat.data.tokenizer import character_tokenizer
from offbeat.errors import ConfigError
from offbeat.model.tiny import build_tiny
from offbeat.runs.teacher import open_teacher
from small_run import TINY, SmallRun, build_small_model, offbeat, small_config, torchrun

TOP_K = {"algorithm__objective": "forward_kl", "algorithm__filters": "[]", "teacher__top_k": "4"}
ALIKE = {"algorithm__preset": "opd", "rollout__reward": ""}


def taught(config: Config) -> object:
    async def main() -> object:
        async with AsyncExitStack() as stack:
            make = await open_teacher(stack, config.for_ranks, read_inputs(config), data=config.data)
            return make(None, lambda *_: None)  # pyright: ignore[reportArgumentType]

    return type(asyncio.run(main())).__name__


def test_the_settings_choose_the_teacher(tmp_path: Path, model_dir: str) -> None:
    assert taught(small_config(tmp_path, model_dir)) == "NoneType"
    assert taught(small_config(tmp_path, model_dir, algorithm__preset="sdft")) == "SelfTeacher"
    assert taught(small_config(tmp_path, model_dir, algorithm__preset="opd", teacher__path=model_dir)) == "RankTeacher"


def test_a_teacher_that_cannot_score_the_policys_tokens_is_refused_before_anything_starts(tmp_path: Path, model_dir: str) -> None:
    other = character_tokenizer("0123456789> zyxwvutsrqponmlkjihgfedcba\n+-*/=(),.?#:")
    other.save(tmp_path / "other")
    build_tiny(tmp_path / "other", tiny=TINY, vocab_size=other.vocab_size, eos_token_id=0, pad_token_id=1, seed=0)
    with pytest.raises(ConfigError, match=r"teacher.path = '.*other' has another tokenizer than the policy, as the token 'a' shows"):
        read_inputs(small_config(tmp_path, model_dir, algorithm__preset="opd", teacher__path=str(tmp_path / "other")))
    short = TINY.model_copy(update={"max_positions": 16})
    tokenizer = character_tokenizer()
    tokenizer.save(tmp_path / "short")
    build_tiny(tmp_path / "short", tiny=short, vocab_size=tokenizer.vocab_size, eos_token_id=0, pad_token_id=1, seed=0)
    with pytest.raises(ConfigError, match=r"teacher.path = '.*short' has a context of 16 tokens, and samples may have 64"):
        read_inputs(small_config(tmp_path, model_dir, algorithm__preset="opd", teacher__path=str(tmp_path / "short")))
    assert read_inputs(small_config(
        tmp_path, model_dir, algorithm__preset="opd", teacher__path=str(tmp_path / "short"), inference__max_context="16"))


@pytest.mark.whole_run
def test_a_run_learns_from_a_folder_beside_an_adapter(tmp_path: Path, model_dir: str) -> None:
    run, teacher = SmallRun(tmp_path, model_dir), build_small_model(tmp_path / "teacher", seed=5)
    done = offbeat("train", *run.arguments(**ALIKE, teacher__path=teacher, model__lora__rank="4", train__num_ranks="2"))
    assert done.returncode == 0, done.stderr
    for row in run.metrics():
        assert row["teacher/missing_share"] == row["teacher/too_long_share"] == 0 != row["teacher/reverse_kl_mean"]
        assert row["step/score_s"] > 0 and row["train/grad_norm"] > 0


@pytest.mark.whole_run
def test_a_run_in_spmd_mode_learns_the_likeliest_tokens_of_an_engine(tmp_path: Path, model_dir: str, start_engine) -> None:
    run = SmallRun(tmp_path, model_dir)
    _, url = start_engine(model=build_small_model(tmp_path / "teacher", seed=5))
    done = torchrun("train", *run.arguments(**ALIKE, **TOP_K, teacher__url=url), world=2)
    assert done.returncode == 0, done.stderr
    for row in run.metrics():
        assert 0 < row["teacher/top_entropy_mean"] < 1.39 and row["train/tokens"] == 4 * row["rollout/generated_tokens"]
        assert row["train/loss"] > 0, "a divergence"


@pytest.mark.whole_run
def test_a_run_of_several_heads_teaches_itself(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = torchrun("train", *run.arguments(
        algorithm__preset="sdft", teacher__template="{answer} {prompt}", rollout__reward="", train__parallel__shard="2",
        rollout__single_rank_load="false", rollout__balance_batch="false"), world=2)
    assert done.returncode == 0, done.stderr
    for row in run.metrics():
        assert row["teacher/missing_share"] == row["teacher/too_long_share"] == 0 and row["train/grad_norm"] > 0
