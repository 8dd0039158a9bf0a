"""What is told of a step, read from the records of real runs."""

import weakref
from pathlib import Path

import pytest

from faults.workshop import Workshop
from offbeat.data.trajectory import Group
from offbeat.memory import let_go
from small_run import SmallRun, small_config


def test_a_row_has_its_own_throughput_and_the_newest_publish_and_its_rollouts_are_kept_if_asked_for(
    shop: Workshop, tmp_path: Path, model_dir: str,
) -> None:
    shop.run(small_config(tmp_path, model_dir, evaluate__every_steps="1", telemetry__rollouts_every_steps="2"))
    run = SmallRun(tmp_path, model_dir)
    for row, event in zip(run.metrics(), run.events("publish"), strict=False):
        assert row["step/total_s"] > row["step/evaluate_s"] > 0, "an evaluation is a part of the step that it follows"
        assert row["throughput/generated_tokens_per_s"] == pytest.approx(row["rollout/generated_tokens"] / row["step/total_s"], rel=1e-3)
        assert row["throughput/trained_tokens_per_s"] == pytest.approx(row["train/tokens"] / row["step/total_s"], rel=1e-3)
        assert row["publish/written_bytes"] == event["num_bytes"] > 0
    assert len(run.metrics()) == 2
    assert [path.name for path in sorted((run.folder / "rollouts").glob("step-*"))] == ["step-000002.jsonl.zst"]


def test_the_groups_of_a_step_are_held_last_and_lets_them_go_in_portions(
    shop: Workshop, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed: list[list[bool]] = []

    async def watched(groups: list[Group]) -> None:
        known = [weakref.ref(group) for group in groups]
        await let_go(groups)
        freed.append([ref() is None for ref in known])

    monkeypatch.setattr("offbeat.controller.step_record.let_go", watched)
    shop.run(small_config(tmp_path, model_dir))
    assert freed == [[], [True, True]]
