"""The reader of rollouts."""

import json
from pathlib import Path

import pytest

from offbeat.data.stored_rollouts import KeptGroup, KeptTrajectory, group_at, kept_files, read_groups, read_rollouts
from offbeat.errors import DataError
from offbeat.telemetry.rollout_log import RolloutLog

OLD = {"tokens": [3, 4, 0], "loss_mask": [False, True, True], "rollout_logprobs": [0, -0.5, -0.5], "versions": [-1, 2, 3], "reward": None}


def line(prompt_id: str, **fields: object) -> bytes:
    return json.dumps({"prompt_id": prompt_id, "admitted_version": 0, "trajectories": [OLD], **fields}).encode()


def write(run_dir: Path) -> None:
    log = RolloutLog(run_dir / "rollouts")
    log.write(2, [line("0:3"), line("0:4")], [lambda step: line("0:9", rejected="no", step=step)])
    log.write(1, [line("0:1")])
    (run_dir / "rollouts" / "notes.txt").write_text("mine")


def test_groups_come_by_step_and_rejected_ones_only_if_asked_for(tmp_path: Path) -> None:
    write(tmp_path)
    assert [(group.step, group.prompt_id) for group in read_rollouts(tmp_path)] == [(1, "0:1"), (2, "0:3"), (2, "0:4")]
    assert [group.prompt_id for group in read_rollouts(tmp_path, step=2, rejected=True)] == ["0:3", "0:4", "0:9"]
    assert list(read_rollouts(tmp_path / "nothing")) == []


def test_a_group_is_found_by_its_place(tmp_path: Path) -> None:
    write(tmp_path)
    file = kept_files(tmp_path)[1]
    assert (file.step, file.is_rejected) == (2, False)
    found = group_at(file, 1)
    assert found is not None and found.prompt_id == "0:4" and found.step == 2
    assert group_at(file, 2) is None


def test_files_of_earlier_versions_show_ids_instead_of_text(tmp_path: Path) -> None:
    write(tmp_path)
    (trajectory,) = next(iter(read_rollouts(tmp_path))).trajectories
    assert trajectory.pieces == ["<3>", "<4>", "<0>"] and trajectory.completion == "<4><0>"
    assert (trajectory.version, trajectory.num_generated, trajectory.advantage, trajectory.reward) == (2, 2, None, None)


def test_turns_are_told_apart_and_the_advantage_is_the_mean() -> None:
    mask = [False, True, False, True]
    t = KeptTrajectory([1, 2, 3, 4], mask, [0.0] * 4, [-1, 0, -1, 1], 1.0, text="aéñ", lengths=[1, 1, 0, 1], advantages=[0, 1, 0, None])
    assert t.pieces == ["a", "é", "", "ñ"] and t.completion == "é\nñ" and t.advantage == 1.0
    empty = KeptTrajectory([1], [False], [0.0], [-1], 0.0)
    assert (empty.version, empty.completion, empty.advantage) == (None, "", None)


def test_damage_is_told_with_the_file_and_a_file_that_is_gone_is_empty(tmp_path: Path) -> None:
    write(tmp_path)
    step, twice = kept_files(tmp_path)[:2]
    step.path.write_bytes(step.path.read_bytes()[:-9] + b"damaged!!")
    with pytest.raises(DataError, match=r"step-000001.*remove the file"):
        list(read_groups(step))
    RolloutLog(tmp_path / "rollouts").write(2, [line("0:1"), b'{"prompt_id": 3}'])
    with pytest.raises(DataError, match="line 2 is not a group of rollouts"):
        list(read_groups(twice))
    twice.path.unlink()
    assert list(read_groups(twice)) == [] and group_at(twice, 0) is None


def test_a_group_can_be_made_by_hand() -> None:
    assert KeptGroup("0:0", 0).trajectories == ()
