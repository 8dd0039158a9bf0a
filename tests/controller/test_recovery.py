"""Runs that are killed, with SIGKILL for the whole process group, and go on from their journals."""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from offbeat.algorithms.coefficients import Coefficients
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.controller.recovery import finite, state_of
from offbeat.controller.state import Highlights, LoopStep, SavedState
from offbeat.data.wire import decode_json
from offbeat.journal.records import GroupFinished, GroupSettled, PromptDrawn, Record, decode_record
from offbeat.journal.segments import Reader, find
from small_run import SmallRun, start_offbeat
from waiting import wait_until

COEFFICIENTS = Coefficients.of(AlgorithmConfig())
SETTINGS = {
    "run__total_steps": "40", "checkpoint__every_steps": "7", "checkpoint__keep": "50", "evaluate__every_steps": "4",
    "rollout__max_concurrent_rollouts": "8"}


def test_the_state_of_a_step_is_that_of_its_checkpoint() -> None:
    data = state_of(LoopStep(5, 6, 7), Highlights(max_staleness=2), COEFFICIENTS, finite({"a": 1.5, "b": float("nan")}))
    saved = decode_json(SavedState, data)
    assert saved == SavedState(5, 7, (), Highlights(max_staleness=2), None, COEFFICIENTS, {"a": 1.5, "b": None})


def run_until_killed(run: SmallRun, condition: Callable[[], object], **changes: str) -> None:
    """Run the command, and kill it with all its processes when the condition holds."""
    with start_offbeat("train", *run.arguments(**SETTINGS | changes)) as process:
        try:
            wait_until(lambda: process.poll() is not None or condition(), timeout_s=120)
        finally:
            assert process.poll() is None, process.communicate()[1]
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def num_rows(run: SmallRun) -> int:
    return len(run.metrics()) if (run.folder / "metrics.jsonl").exists() else 0


def records_of(run: SmallRun) -> dict[int, list[Record]]:
    """All records by the number of their segment."""
    return {segment.number: [decode_record(each.payload) for each in Reader([segment])] for segment in find(run.folder / "journal")}


def newest_weights(run: SmallRun) -> tuple[int, Path]:
    folders = [path for path in (run.folder / "weights").iterdir() if (path / "model.safetensors").exists()]
    newest = max(folders, key=lambda path: path.name)
    return int(newest.name[1:9]), newest


@pytest.mark.drill
@pytest.mark.parametrize("eta", ["0", "2"])
def test_after_kills_nothing_is_lost_doubled_or_generated_twice_and_redone_steps_give_the_same_weights(
    tmp_path: Path, model_dir: str, eta: str,
) -> None:
    run = SmallRun(tmp_path, model_dir)
    run_until_killed(run, lambda: num_rows(run) >= 12, rollout__max_head_offpolicyness=eta)
    version, folder = newest_weights(run)
    shutil.copytree(folder, tmp_path / "was")
    lives = [records_of(run)]
    run_until_killed(run, lambda: num_rows(run) >= 24, rollout__max_head_offpolicyness=eta)
    lives.append(records_of(run))
    with start_offbeat("train", *run.arguments(**SETTINGS, rollout__max_head_offpolicyness=eta)) as process:
        error = process.communicate(timeout=200)[1]
    assert process.returncode == 0, error
    lives.append(records_of(run))

    told = [event["text"] for event in run.events("recovered")]
    assert len(told) == 2 and all("is redone" in text or "are redone" in text for text in told)
    assert not run.events("journal")
    finished: set[str] = set()
    settled: set[str] = set()
    drawn: set[str] = set()
    known: set[int] = set()
    for life in lives:
        before = set(finished)
        for record in (record for number, records in life.items() if number not in known for record in records):
            match record:
                case PromptDrawn(prompt_id):
                    drawn.add(prompt_id)
                    assert prompt_id not in before, "a group that was finished is not generated again"
                case GroupFinished(prompt_id):
                    finished.add(prompt_id)
                case GroupSettled(prompt_id, again=False):
                    settled.add(prompt_id)
        known |= life.keys()
    rows = run.metrics()
    assert [row["global_step"] for row in rows] == list(range(1, 41))
    assert all(row["rollout/staleness_max_versions"] <= int(eta) for row in rows)
    trained = Counter(group["prompt_id"] for step in range(1, 41) for group in run.groups(step))
    assert set(trained.values()) == {1} and len(trained) == 80 and drawn <= trained.keys() | settled and not trained.keys() & settled
    assert version >= 11
    check_weights(run, tmp_path / "was", version)


def check_weights(run: SmallRun, was: Path, version: int) -> None:
    """The steps that were redone have made the weights of before: a checkpoint was saved after them, which a run of no step publishes."""
    step = next(event["global_step"] for event in run.events("resumed"))
    assert step in (version, version - 1)
    if step == version:
        for path in (run.folder / "checkpoints").iterdir():
            if int(path.name[5:]) > step:
                shutil.rmtree(path)
        shutil.rmtree(run.folder / "journal")
        shutil.rmtree(run.folder / "weights")
        run_until_killed(run, lambda: [*(run.folder / "weights").glob(f"v{version + 1:08d}-*")], weights__keep="100")
        [first] = (run.folder / "weights").glob(f"v{version:08d}-*")
        now, then = load_file(first / "model.safetensors"), load_file(was / "model.safetensors")
        assert all((now[name] == then[name]).all() for name in then) and now.keys() == then.keys()
