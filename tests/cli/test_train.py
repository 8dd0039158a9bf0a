"""`offbeat train`: what it prints. What it leaves behind is tested in `tests/runs/test_run.py`."""

import json

from small_run import SmallRun


def printed(run: SmallRun) -> list[dict]:
    assert run.done is not None
    return [json.loads(line) for line in run.done.stdout.splitlines()]


def test_json_is_one_object_per_line_from_start_to_finish(finished_run: SmallRun) -> None:
    events = printed(finished_run)
    assert events[0] == {"event": "start", "title": "small · grpo", "total_steps": 2}
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2]
    assert events[-1]["event"] == "finish"
    assert {name: value for name, value in events[-1].items() if name != "event"} == json.loads(
        (finished_run.folder / "result.json").read_text())
    assert finished_run.done is not None and finished_run.done.stderr == ""
    assert (finished_run.folder / "report.html").exists()


def test_one_interrupt_ends_after_the_step_and_saves(stopped_run: SmallRun) -> None:
    assert stopped_run.done is not None
    assert (stopped_run.done.returncode, stopped_run.done.stderr) == (130, "")
    events = printed(stopped_run)
    assert {"event": "note", "text": "stopping after this step; press Ctrl-C again to stop at once"} in events
    assert events[-1]["stopped_early"] is True
    assert "to go on" not in stopped_run.done.stdout, "programs know how they have called it"
    last = stopped_run.metrics()[-1]["global_step"]
    assert (stopped_run.folder / "checkpoints" / f"step-{last:08d}" / "complete.json").exists()
