"""Reward models with two real ranks in SPMD mode: one that crashes goes on with the very losses that it would have had."""

import json
from pathlib import Path

import pytest

from crashing import play_pairs, whole_and_cut
from offbeat.config.root import Config
from offbeat.controller.reward_model import RewardLesson
from offbeat.controller.supervised import SftResult
from offbeat.data.reward_model import open_reward_folder
from offbeat.errors import ConfigError
from ranks import run_ranks
from small_run import small_config

CHAT = [{"role": "user", "content": "7+5"}]
SETTINGS = {
    "data__task": "", "data__heldout_size": "3", "reward_model__total_steps": "4", "reward_model__batch_size": "4",
    "reward_model__optimizer__lr": "1e-2", "reward_model__optimizer__warmup_steps": "0", "reward_model__evaluate_every_steps": "2",
    "checkpoint__every_steps": "2", "rollout__balance_batch": "false"}


def write_pairs(path: Path) -> str:
    """Chats, some with a margin."""
    rows = [
        {"prompt": CHAT, "chosen": [{"role": "assistant", "content": f"ok{i}" * (1 + i % 2)}],
         "rejected": [{"role": "assistant", "content": f"no{i}"}], "margin": i % 2} for i in range(13)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def play(groups, config: Config, *, crash_at: int = 0) -> SftResult:
    """One process's part of a run."""
    return play_pairs(groups, config, RewardLesson, crash_at=crash_at)


def cut_off_and_whole(groups, argument: dict) -> list[list[dict]] | None:
    return whole_and_cut(groups, argument, play)


@pytest.mark.whole_run
def test_a_run_that_crashes_goes_on_with_the_losses_of_one_that_did_not(tmp_path: Path, model_dir: str) -> None:
    settings = {**SETTINGS, "data__path": write_pairs(tmp_path / "pairs.jsonl")}
    [whole, cut], _ = run_ranks(cut_off_and_whole, world=2, argument={"model": model_dir, "root": str(tmp_path), "settings": settings})
    assert [row["global_step"] for row in whole] == [1, 2, 3, 4] and cut == whole
    assert whole[-1]["reward_model/margin_mean"] > whole[0]["reward_model/margin_mean"] == 0
    assert [("eval/accuracy" in row) for row in whole] == [False, True, False, True]
    for name in ("whole", "cut"):
        [export] = (tmp_path / name).glob("*/export")
        assert open_reward_folder(str(export)).tokenizer.has_chat_template, "its pairs were chats"


def test_ranks_that_draw_each_for_itself_are_refused(tmp_path: Path, model_dir: str) -> None:
    config = small_config(
        tmp_path, model_dir, **SETTINGS, data__path=write_pairs(tmp_path / "p.jsonl"), run__mode="spmd", rollout__single_rank_load="false")
    with pytest.raises(ConfigError, match="rollout.single_rank_load must be true to train on preferences, got false"):
        RewardLesson.read(config)
