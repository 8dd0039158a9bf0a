"""Runs that are killed, with SIGKILL for the whole process group, and go on from their journals."""

import asyncio
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from chaos.ledger import Ledger
from offbeat.algorithms.coefficients import Coefficients
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.curriculum import CurriculumConfig
from offbeat.controller.parts import SingleProcess
from offbeat.controller.recovery import Recovered, StepRecovery, finite, state_of
from offbeat.controller.scoring import ScoredBatch
from offbeat.controller.state import HeadState, Highlights, LoopStep, RunState, SavedState
from offbeat.data.dataset import ListDataset
from offbeat.data.identity import Identity
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream, StreamState
from offbeat.data.trajectory import Group, Trajectory
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
    StepTrained,
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


def recover(tmp_path: Path, *, reason: str = "", base: int = 4, **changed: float) -> tuple[Recovered, list[str]]:
    """Go on from a checkpoint of step `base`, 0 for none, with a journal that has a finished group; returns what was said, too."""
    said: list[str] = []
    place = write_group(tmp_path, Group("0:1", 3))
    standing = JournalStanding(base)
    begun = RecordEntry(JournalBegun(base, encode_json(IDENTITY), JournalHead(StreamState(0, 2), ("0:1", "0:0")))).to_bytes()
    settled = RecordEntry(GroupSettled("0:2", "not accepted", "", False, (1.0,))).to_bytes()
    standing.follow(Stored(place, each) for each in (begun, place.read(), settled, RecordEntry(PromptDrawn("1:3", 3, 1, 4)).to_bytes()))
    journal = SimpleNamespace(read=lambda since: (standing, reason) if since == base else None)
    parts = SimpleNamespace(
        journal=journal, peers=SingleProcess(), source=SimpleNamespace(draws=True), num_heads=1,
        inputs=SimpleNamespace(identity=replace(IDENTITY, settings={"train.optimizer.lr": 1e-3, **changed})),
        record=SimpleNamespace(run_dir=tmp_path, writes=True, note=lambda _kind, text: said.append(text), stored=nothing))
    stream = PromptStream(ListDataset([Row(f"{index}", "") for index in range(5)]), seed=0)
    recovery = StepRecovery(parts, SimpleNamespace(), SimpleNamespace(), stream, algorithm=AlgorithmConfig(), keep=nothing)
    return asyncio.run(recovery.run(SAVED if base else None, RunState(total_steps=9))), said


async def nothing(*_: object) -> None:
    pass


def test_finished_groups_and_the_position_in_the_data_are_those_of_the_journal(tmp_path: Path) -> None:
    recovered, said = recover(tmp_path)
    assert [group.prompt_id for group in recovered.held.ready] == ["0:1"] and not recovered.held.taken and not recovered.num_redone
    assert recovered.saved == replace(SAVED, heads=(HeadState(StreamState(1, 4), ("0:0", "1:3")),))
    assert said == ["the journal goes further than the checkpoint: no step is redone, and 1 finished group is kept"]


def test_without_a_checkpoint_the_run_goes_on_from_the_initial_model(tmp_path: Path) -> None:
    recovered, said = recover(tmp_path, base=0)
    assert recovered.begins and [group.prompt_id for group in recovered.held.ready] == ["0:1"]
    assert (recovered.saved.global_step, recovered.saved.heads[0].in_flight) == (0, ("0:0", "1:3"))
    assert said == ["the journal goes on from the initial model: no step is redone, and 1 finished group is kept"]
    recovered, said = recover(tmp_path, base=0, **{"train.optimizer.lr": 1e-4})
    assert recovered.begins and recovered.saved.heads == (HeadState(StreamState(), ()),) and not recovered.held.ready


@pytest.mark.parametrize("is_stored", [False, True])
def test_rollouts_of_a_redone_step_are_stored_if_the_kill_came_before_that(tmp_path: Path, *, is_stored: bool) -> None:
    standing, done = JournalStanding(4), []
    begun = JournalBegun(4, encode_json(IDENTITY), JournalHead(StreamState(), ()))
    trained = StepTrained(5, state_of(LoopStep(5, 4, 5), Highlights(), COEFFICIENTS))
    place = write_group(tmp_path, Group("0:1", 3))
    records = (begun, PromptDrawn("0:1", 3, 0, 1), None, BatchTaken(5, ("0:1",)), trained)
    standing.follow(Stored(place, place.read() if each is None else RecordEntry(each).to_bytes()) for each in records)
    batch = SimpleNamespace(with_columns=lambda **_columns: "batch")

    async def take(groups: list[Group], *_: object) -> tuple[object, None]:
        assert [group.prompt_id for group in groups] == ["0:1"]
        return batch, None

    async def score(*_: object) -> ScoredBatch:
        return ScoredBatch(batch)

    async def keep(step: LoopStep, groups: list[Group], kept: object) -> None:
        done.append((step.global_step, [group.prompt_id for group in groups], kept))

    parts = SimpleNamespace(
        trainers=SimpleNamespace(balance_by=lambda _cost: None),
        journal=SimpleNamespace(read=lambda _base: (standing, "")), peers=SingleProcess(), source=SimpleNamespace(draws=True), num_heads=1,
        inputs=SimpleNamespace(identity=IDENTITY), turns=SimpleNamespace(to_ranks=nothing), publisher=None,
        record=SimpleNamespace(
            run_dir=tmp_path, writes=True, note=print, stored=nothing, has_rollouts=lambda step: step == 5 and is_stored))
    recovery = StepRecovery(
        parts, SimpleNamespace(take=take), SimpleNamespace(score=score, train=nothing), PromptStream(ListDataset([Row("", "")]), seed=0),
        algorithm=AlgorithmConfig(), keep=keep)
    recovered = asyncio.run(recovery.run(SAVED, RunState(total_steps=9)))
    assert recovered.num_redone == 1 and not recovered.begins
    assert done == ([] if is_stored else [(5, ["0:1"], "batch")])


@pytest.mark.parametrize("seed", range(12))
def test_a_curriculum_stands_where_it_stood_after_any_history(tmp_path: Path, seed: int) -> None:
    chance, config = random.Random(seed), CurriculumConfig(pools=True, leave_at=0.5, hard_weight=0.5, normal_weight=1.0, easy_weight=0.5)
    rows = ListDataset([Row(f"{index}", "") for index in range(4)])
    stream, standing, running, ready, step = PromptStream(rows, seed=0, curriculum=config), JournalStanding(4), [], [], 4
    path = tmp_path / "records"

    def note(*records: Record | Group) -> None:
        with path.open("ab") as file:
            for record in records:
                data = (GroupEntry(record) if isinstance(record, Group) else RecordEntry(record)).to_bytes()
                standing.follow([Stored(RecordPlace(path, file.tell(), len(data)), data)])
                file.write(data)
                file.flush()

    note(JournalBegun(4, b"{}", JournalHead(stream.state(), ())))
    taken: list[Group] = []
    for _ in range(150):
        event = chance.choice(["draw", "draw", "finish", "finish", "reject", "take", "train"])
        if event == "draw" and len(running) < 4:
            prompt_id, _row = stream.next()
            if prompt_id not in running and all(prompt_id != each.prompt_id for each in (*ready, *taken)):
                running.append(prompt_id)
            note(PromptDrawn(prompt_id, 0, *stream.position))
        elif event in ("finish", "reject") and running:
            empty = np.zeros(0)
            played = Group(running.pop(0), 0, (Trajectory(empty, empty, empty, empty, float(chance.random() < 0.6)),))
            if event == "finish":
                ready.append(played)
                note(played)
            else:
                stream.note(played)
                note(GroupSettled(played.prompt_id, "equal rewards", "", False, tuple(played.rewards.tolist())))
        elif event == "take" and ready and not taken:
            taken, ready, step = ready[:1], ready[1:], step + 1
            for group in taken:
                stream.note(group)
            note(BatchTaken(step, (taken[0].prompt_id,)))
        elif event == "train" and taken:
            note(StepTrained(step, b"{}"))
            taken = []
        if not taken:
            other = PromptStream(rows, seed=0, curriculum=config)
            recovery = StepRecovery(SimpleNamespace(record=None), None, None, other, algorithm=AlgorithmConfig(), keep=nothing)
            assert recovery._head(standing).stream == stream.state()


def write_group(folder: Path, group: Group) -> RecordPlace:
    data = GroupEntry(group).to_bytes()
    (folder / "record").write_bytes(data)
    return RecordPlace(folder / "record", 0, len(data))


def test_damage_is_told_and_the_records_before_it_are_used(tmp_path: Path) -> None:
    recovered, said = recover(tmp_path, reason="00000007.log is not as it was written from byte 90 of 99 on")
    assert len(recovered.held.ready) == 1
    assert said[0] == "the journal is used as far as it goes: 00000007.log is not as it was written from byte 90 of 99 on"


def test_with_other_settings_the_run_goes_on_from_the_checkpoint_alone(tmp_path: Path) -> None:
    recovered, said = recover(tmp_path, **{"train.optimizer.lr": 1e-4})
    assert recovered.saved == SAVED and not recovered.held.ready
    assert said == ["the journal is not used: continues with train.optimizer.lr = 0.0001, was 0.001"]


def run_until_killed(run: SmallRun, condition: Callable[[], object], *, timeout_s: float = 120, **changes: str) -> None:
    """Run the command, and kill it with all its processes when the condition holds."""
    with start_offbeat("train", *run.arguments(**SETTINGS | changes)) as process:
        try:
            wait_until(lambda: process.poll() is not None or (_is_journaled(run) and condition()), timeout_s=timeout_s)
        finally:
            assert process.poll() is None, process.communicate()[1]
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _is_journaled(run: SmallRun) -> bool:
    """Whether the journal's first record is in its file, which a busy disk may hold up."""
    return any(path.stat().st_size for path in (run.folder / "journal").glob("*.log"))


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
    stored = {int(path.name[5:11]): [group["prompt_id"] for group in read_rollouts(path)] for path in run.folder.glob("rollouts/step-*")}
    assert stored.keys() == set(range(1, 41)) and all(stored[step] == list(prompt_ids) for step, prompt_ids in taken.items())
    trained = Counter(prompt_id for step in range(1, 41) for prompt_id in stored[step])
    assert set(trained.values()) == {1} and len(trained) == 80 and drawn <= trained.keys() | settled and not trained.keys() & settled
    assert version >= 11
    check_weights(run, tmp_path / "was", version)


@pytest.mark.drill
def test_a_run_without_a_checkpoint_goes_on_from_its_journal(tmp_path: Path, model_dir: str) -> None:
    run, settings = SmallRun(tmp_path, model_dir), {"checkpoint__every_steps": "0", "run__total_steps": "12"}
    run_until_killed(run, lambda: num_rows(run) >= 5, **settings)
    before = [group["prompt_id"] for step in range(1, 6) for group in run.groups(step)]
    with start_offbeat("train", *run.arguments(**SETTINGS | settings)) as process:
        error = process.communicate(timeout=200)[1]
    assert process.returncode == 0, error
    assert [row["global_step"] for row in run.metrics()] == list(range(1, 13)) and not list(tmp_path.glob("small.*"))
    trained = [group["prompt_id"] for step in range(1, 13) for group in run.groups(step)]
    assert trained[: len(before)] == before and len(set(trained)) == 24
    [told] = run.events("recovered")
    assert "from the initial model" in told["text"]


@pytest.mark.drill
def test_a_run_with_1000_finished_groups_loses_none_by_kills(tmp_path: Path, model_dir: str) -> None:
    run, ledger = SmallRun(tmp_path, model_dir), Ledger(tmp_path / "small", eta=0)
    settings = {
        "run__total_steps": "1", "evaluate__every_steps": "0", "rollout__max_head_offpolicyness": "0",
        "rollout__consumer_batch_size": "1500", "rollout__max_concurrent_rollouts": "64", "cluster__start_timeout_s": "600",
        "inference__start_timeout_s": "600"}

    def num_finished() -> int:
        time.sleep(0.2)  # reading takes the run's time
        return sum(isinstance(record, GroupFinished) for records in records_of(run).values() for record in records)

    run_until_killed(run, lambda: num_finished() >= 1000, timeout_s=900, **settings)
    ledger.audit()
    finished = dict(ledger.finished)
    files = run.folder / "journal"
    run_until_killed(run, lambda: len([*files.glob("*.log")]) > 1, timeout_s=900, **settings)  # it is writing them down again
    ledger.audit()
    with start_offbeat("train", *run.arguments(**SETTINGS | settings)) as process:
        error = process.communicate(timeout=900)[1]
    assert process.returncode == 0, error
    ledger.audit()
    assert not ledger.problems and 1000 <= len(finished) < 1500
    assert len(ledger.trained[1]) == len(set(ledger.trained[1])) == 1500 and finished.keys() <= set(ledger.trained[1])
    first, second = (event["text"] for event in run.events("recovered"))
    assert first.endswith(f"no step is redone, and {len(finished)} finished groups are kept")
    assert int(second.split()[-5]) >= len(finished)


ROADS = {
    "critic": {"algorithm__preset": "ppo", "critic__normalise": "true"},
    "reference": {"algorithm__kl_loss": "k3", "algorithm__kl_coefficient": "1e-3"},
    "two ranks": {"train__num_ranks": "2"}}


@pytest.mark.drill
@pytest.mark.parametrize("road", ROADS)
def test_redone_steps_give_the_same_weights_with(tmp_path: Path, model_dir: str, road: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    settings = ROADS[road] | {"checkpoint__every_steps": "0", "weights__keep": "100", "run__total_steps": "12"}
    run_until_killed(run, lambda: num_rows(run) >= 5, **settings)
    version, folder = newest_weights(run)
    shutil.copytree(folder, tmp_path / "was")
    with start_offbeat("train", *run.arguments(**SETTINGS | settings)) as process:
        error = process.communicate(timeout=200)[1]
    assert process.returncode == 0, error
    [again] = (path for path in (run.folder / "weights").glob(f"v{version:08d}-*") if path.name != folder.name)
    now, then = (load_file(path / "model.safetensors") for path in (again, tmp_path / "was"))
    assert now.keys() == then.keys() and len(run.events("recovered")) == 1
    for name, values in then.items():
        np.testing.assert_allclose(now[name], values, rtol=0, atol=1e-5 if road == "two ranks" else 0, err_msg=name)


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
