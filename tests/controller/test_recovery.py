"""Runs that are killed, with SIGKILL for the whole process group, and go on from their journals."""

import asyncio
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file

from offbeat.algorithms.coefficients import Coefficients
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.controller.parts import SingleProcess
from offbeat.controller.recovery import Recovered, StepRecovery, finite, state_of
from offbeat.controller.state import HeadState, Highlights, LoopStep, SavedState
from offbeat.data.dataset import ListDataset
from offbeat.data.identity import Identity
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream, StreamState
from offbeat.data.trajectory import Group
from offbeat.data.wire import decode_json, encode_json
from offbeat.journal.records import (
    BatchTaken,
    GroupEntry,
    GroupFinished,
    GroupSettled,
    JournalBegun,
    JournalHead,
    PromptDrawn,
    Record,
    RecordEntry,
    decode_record,
)
from offbeat.journal.segments import Reader, RecordPlace, Stored, find
from offbeat.journal.standing import JournalStanding
from small_run import SmallRun, read_rollouts, start_offbeat
from waiting import wait_until

COEFFICIENTS = Coefficients.of(AlgorithmConfig())
SETTINGS = {
    "run__total_steps": "40", "checkpoint__every_steps": "7", "checkpoint__keep": "50", "evaluate__every_steps": "4",
    "rollout__max_concurrent_rollouts": "8"}


def test_the_state_of_a_step_is_that_of_its_checkpoint() -> None:
    data = state_of(LoopStep(5, 6, 7), Highlights(max_staleness=2), COEFFICIENTS, finite({"a": 1.5, "b": float("nan")}))
    saved = decode_json(SavedState, data)
    assert saved == SavedState(5, 7, (), Highlights(max_staleness=2), None, COEFFICIENTS, {"a": 1.5, "b": None})


IDENTITY = Identity({"train.optimizer.lr": 1e-3}, "rows", 10, "weights", "tokens", {})
SAVED = SavedState(4, 4, (HeadState(StreamState(0, 2), ("0:1",)),), identity=IDENTITY)


def recover(tmp_path: Path, *, reason: str = "", **changed: float) -> tuple[Recovered, list[str]]:
    """Go on from a checkpoint of step 4 with a journal that has a finished group; returns what was said, too."""
    said: list[str] = []
    group = Group("0:1", 3)
    packed = GroupEntry(group).to_bytes()
    (tmp_path / "record").write_bytes(packed)
    standing = JournalStanding(4)
    begun = RecordEntry(JournalBegun(4, encode_json(IDENTITY), JournalHead(StreamState(0, 2), ("0:1", "0:0")))).to_bytes()
    settled = RecordEntry(GroupSettled("0:2", "not accepted", "", False, (1.0,))).to_bytes()
    place = RecordPlace(tmp_path / "record", 0, len(packed))
    standing.follow(Stored(place, each) for each in (begun, packed, settled, RecordEntry(PromptDrawn("1:3", 3, 1, 4)).to_bytes()))
    journal = SimpleNamespace(read=lambda base: (standing, reason) if base == 4 else None)
    parts = SimpleNamespace(
        journal=journal, peers=SingleProcess(), source=SimpleNamespace(draws=True),
        inputs=SimpleNamespace(identity=replace(IDENTITY, settings={"train.optimizer.lr": 1e-3, **changed})),
        record=SimpleNamespace(run_dir=tmp_path, writes=True, note=lambda _kind, text: said.append(text)))
    stream = PromptStream(ListDataset([Row(f"{index}", "") for index in range(5)]), seed=0)
    recovery = StepRecovery(parts, SimpleNamespace(), SimpleNamespace(), stream, algorithm=AlgorithmConfig())
    return asyncio.run(recovery.run(SAVED)), said


def test_finished_groups_and_the_position_in_the_data_are_those_of_the_journal(tmp_path: Path) -> None:
    recovered, said = recover(tmp_path)
    assert [group.prompt_id for group in recovered.held.ready] == ["0:1"] and not recovered.held.taken and not recovered.num_redone
    assert recovered.saved == replace(SAVED, heads=(HeadState(StreamState(1, 4), ("0:0", "1:3")),))
    assert said == ["the journal goes further than the checkpoint: no step is redone, and 1 finished group is kept"]


def test_damage_is_told_and_the_records_before_it_are_used(tmp_path: Path) -> None:
    recovered, said = recover(tmp_path, reason="00000007.log is not as it was written from byte 90 of 99 on")
    assert len(recovered.held.ready) == 1
    assert said[0] == "the journal is used as far as it goes: 00000007.log is not as it was written from byte 90 of 99 on"


def test_with_other_settings_the_run_goes_on_from_the_checkpoint_alone(tmp_path: Path) -> None:
    recovered, said = recover(tmp_path, **{"train.optimizer.lr": 1e-4})
    assert recovered.saved == SAVED and not recovered.held.ready
    assert said == ["the journal is not used: continues with train.optimizer.lr = 0.0001, was 0.001"]


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
    taken: dict[int, tuple[str, ...]] = {}
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
                case BatchTaken(step, prompt_ids):
                    taken[step] = prompt_ids
        known |= life.keys()
    rows = run.metrics()
    assert [row["global_step"] for row in rows] == list(range(1, 41))
    assert all(row["rollout/staleness_max_versions"] <= int(eta) for row in rows)
    # A kill may come before the rollouts of a step are stored, and they are not stored again when the step is redone.
    stored = {int(path.name[5:11]): [group["prompt_id"] for group in read_rollouts(path)] for path in run.folder.glob("rollouts/step-*")}
    trained = Counter(prompt_id for step in range(1, 41) for prompt_id in stored.get(step) or taken[step])
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
