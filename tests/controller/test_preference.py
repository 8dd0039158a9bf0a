"""Preference training with real ranks: it goes on after a crash with the very losses it would have had, and refuses other data."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from crashing import CrashError, play_pairs, whole_and_cut
from offbeat.config.root import Config
from offbeat.controller.preference import PreferenceLesson, _derangement
from offbeat.controller.supervised import SftResult
from offbeat.errors import ConfigError
from ranks import run_alone, run_ranks
from small_run import small_config

SETTINGS = {
    "data__task": "", "data__heldout_size": "3", "preference__total_steps": "5", "preference__batch_size": "4",
    "preference__optimizer__lr": "1e-2", "preference__optimizer__warmup_steps": "0", "preference__evaluate_every_steps": "2",
    "checkpoint__every_steps": "2", "rollout__balance_batch": "false"}


def write_pairs(path: Path, count: int = 13, *, right: str = "ok", labelled: bool = False) -> str:
    """Pairs whose chosen answer begins with `right`, and some answers with a label."""
    rows: list[dict] = [{"prompt": f"{i}=", "chosen": f"{right}{i % 3}" * (1 + i % 2), "rejected": f"no{i}"} for i in range(count)]
    if labelled:
        rows[1::3] = [{"prompt": f"{i}=", "completion": f"no{i}", "label": False} for i in range(1, count, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def play(groups, config: Config, *, crash_at: int = 0) -> SftResult:
    """One process's part of a run."""
    return play_pairs(groups, config, PreferenceLesson, crash_at=crash_at)


def cut_off_and_whole(groups, argument: dict) -> list[list[dict]] | None:
    return whole_and_cut(groups, argument, play)


@pytest.mark.parametrize(("world", "changes"), [
    (1, {}), (1, {"preference__mix": "{simpo = 1.0, sft = 0.5}"}), (1, {"preference__loss": "kto", "model__lora__rank": "4"}),
    pytest.param(2, {"preference__loss": "kto", "model__lora__rank": "4"}, marks=pytest.mark.drill),
])
def test_a_run_that_crashes_goes_on_with_the_losses_of_one_that_did_not(
    world: int, changes: dict[str, str], tmp_path: Path, model_dir: str,
) -> None:
    path = write_pairs(tmp_path / "pairs.jsonl", labelled=changes.get("preference__loss") == "kto")
    argument = {"model": model_dir, "root": str(tmp_path), "settings": {**SETTINGS, "data__path": path, **changes}}
    [whole, cut], *_ = [run_alone(cut_off_and_whole, argument=argument)] if world == 1 else run_ranks(
        cut_off_and_whole, world=world, argument=argument)
    assert [row["global_step"] for row in whole] == list(range(1, 6)) and cut == whole
    assert whole[-1]["train/loss"] < whole[0]["train/loss"] and whole[-1]["preference/margin_mean"] > whole[0]["preference/margin_mean"]
    assert [("eval/accuracy" in row) for row in whole] == [False, True, False, True, True]
    if "preference__mix" not in changes:
        assert abs(whole[0]["preference/chosen_logratio_mean"]) < 1e-4, "before the first step, the policy is the reference"
        assert whole[0]["train/loss"] == pytest.approx(0.5 if changes else np.log(2), abs=1e-4)


def test_the_reference_is_computed_once_and_other_data_is_refused(tmp_path: Path, model_dir: str) -> None:
    path = tmp_path / "pairs.jsonl"
    config = small_config(tmp_path, model_dir, **SETTINGS, data__path=write_pairs(path))
    file = config.run_dir / "reference" / "train.safetensors"

    def body(groups, _) -> None:
        with pytest.raises(CrashError):
            play(groups, config, crash_at=4)
        before, written = load_file(file), file.stat().st_mtime_ns
        other = config.model_copy(update={"data": config.data.model_copy(update={"system_prompt": "add", "chat_template": True})})
        with pytest.raises(ConfigError, match="reference log-probabilities in .*train.safetensors' are of other preferences"):
            play(groups, other)
        write_pairs(path, right="oh")
        with pytest.raises(ConfigError, match="of other preferences"):
            play(groups, config)
        write_pairs(path)
        assert play(groups, config).steps == 5
        assert file.stat().st_mtime_ns == written and all(np.array_equal(before[name], value) for name, value in load_file(file).items())

    run_alone(body)
    assert (config.run_dir / "export" / "config.json").exists()


def test_ranks_that_draw_each_for_itself_are_refused(tmp_path: Path, model_dir: str) -> None:
    config = small_config(
        tmp_path, model_dir, **SETTINGS, data__path=write_pairs(tmp_path / "p.jsonl"), run__mode="spmd", rollout__single_rank_load="false")
    with pytest.raises(ConfigError, match="rollout.single_rank_load must be true to train on preferences, got false"):
        PreferenceLesson.read(config)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_every_row_gets_the_answer_of_another_and_each_answer_is_used_once(count: int) -> None:
    others = _derangement(count, seed=3)
    assert sorted(others) == list(range(count)) and (others != np.arange(count)).all()
