"""The supervised warm-up of a run, drawn from its events. tests/dashboard/test_site.py shows it on the live page."""

import json
from pathlib import Path
from typing import Any

from offbeat.dashboard.report import write_report
from offbeat.dashboard.run_files import RunFiles, read_run
from offbeat.dashboard.warm_up import progress_html, warm_up_html, warm_up_steps


def run_of(folder: Path, *events: dict[str, Any], metrics: str = "") -> RunFiles:
    (folder / "config.toml").touch()
    (folder / "metrics.jsonl").write_text(metrics)
    (folder / "events.jsonl").write_text("".join(json.dumps({"kind": "sft_step"} | event) + "\n" for event in events))
    return read_run(folder)


def test_repeated_steps_count_once_and_other_events_not_at_all(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, {"time_s": 1.0, "step": 1, "train/loss": 3.0}, {"time_s": 2.0, "step": 2, "train/loss": 2.0},
        {"time_s": 3.0, "kind": "publish", "version": 1}, {"time_s": 4.0, "step": 2, "train/loss": 1.0}, {"time_s": 5.0, "step": "x"})
    assert {step: event["train/loss"] for step, event in warm_up_steps(run).items()} == {1: 3.0, 2: 1.0}
    assert "step 2. The curves" in progress_html(run)


def test_a_warm_up_is_what_came_before_the_metrics(tmp_path: Path) -> None:
    events = [{"time_s": 1.0, "step": 1, "train/loss": 3.0}, {"time_s": 2.0, "step": 2, "train/loss": 2.0}]
    after = run_of(tmp_path, *events, metrics='{"global_step": 1, "time_s": 3.0}\n')
    assert len(warm_up_steps(after)) == 2 and warm_up_html(after) and not progress_html(after)
    beside = run_of(tmp_path, *events, metrics='{"global_step": 1, "time_s": 1.0}\n{"global_step": 2, "time_s": 2.0}\n')
    assert not warm_up_steps(beside) and not warm_up_html(beside), "rows of fine-tuning"
    assert not warm_up_steps(run_of(tmp_path, *events, metrics='{"global_step": 1}\n')), "nobody knows which was first"


def test_the_report_has_the_curves_and_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    run_of(tmp_path, {"time_s": 1.0, "step": 1, "train/loss": 3.0, "eval/accuracy": None}, {"time_s": 2.0, "step": 2, "train/loss": None})
    page = write_report(tmp_path).read_text()
    assert "<h2>Supervised warm-up</h2>" in page and "Loss of the warm-up" in page and "accuracy of the warm-up" not in page
    assert "Warming up by supervised training: step 2." in page
