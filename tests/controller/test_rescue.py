"""Which step is saved, and what its checkpoint holds. Runs that end by an error in `tests/runs` are rescued for real."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat.algorithms.coefficients import Coefficients
from offbeat.controller.parts import SingleProcess
from offbeat.controller.rescue import Rescue
from offbeat.controller.state import HeadState, LoopStep, RunState
from offbeat.data.dataset import ListDataset
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream
from offbeat.data.trajectory import Group
from offbeat.errors import StorageError
from offbeat.journal.run_journal import NoJournal
from offbeat.telemetry.record import SilentRecord

STEP = LoopStep(3, 2, 3)


class Checkpoints:
    """Remembers heads by step."""

    full = False
    oldest = 0

    def __init__(self) -> None:
        self.heads: dict[int, HeadState] = {}
        self.unproven: list[bool] = []
        self.unevaluated: list[object] = []
        self.exports = 0

    def has(self, global_step: int) -> bool:
        return global_step in self.heads

    async def save(self, global_step: int, *, head: HeadState, unproven: bool, **rest: object) -> None:
        if self.full:
            raise StorageError("no space left on device")
        assert rest["version"] == STEP.next_version
        self.heads[global_step] = head
        self.unproven.append(unproven)
        self.unevaluated.append(rest["unevaluated"])

    async def export(self) -> None:
        self.exports += 1


def rescue_of(folder: Path, checkpoints: Checkpoints, *, total_steps: int = 9) -> tuple[Rescue, list[str]]:
    record, said = SilentRecord(folder), []
    record.note = lambda kind, text: said.append(f"{kind}: {text}")
    record.console.note = said.append
    stream = PromptStream(ListDataset((Row("1>", "1"), Row("2>", "2"))), seed=0)
    parts = SimpleNamespace(record=record, peers=SingleProcess(), journal=NoJournal())
    rescue = Rescue(parts, RunState(total_steps=total_steps), stream, checkpoints, Coefficients(0.0, 0.0, 0.0))  # pyright: ignore[reportArgumentType]
    rescue.rollouts = SimpleNamespace(in_flight=("0:1",), num_flat_rejected=4, num_tries={}, held=(), calls=())  # pyright: ignore[reportAttributeAccessIssue]
    return rescue, said


def test_the_last_whole_step_is_saved_once_with_the_prompts_that_were_on_their_way(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    rescue, said = rescue_of(tmp_path, checkpoints)
    asyncio.run(rescue.save_last())
    assert not checkpoints.heads, "no step is done"
    rescue.end_step(STEP)
    rescue.taken = [Group("0:0", 0)]
    asyncio.run(rescue.save_last())
    asyncio.run(rescue.save_last())
    assert (checkpoints.heads[3].in_flight, checkpoints.heads[3].num_flat_rejected) == (("0:0", "0:1"), 4)
    assert checkpoints.unproven == [False] and not said


def test_while_a_step_trains_there_is_nothing_whole_to_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    rescue, said = rescue_of(tmp_path, checkpoints)
    rescue.end_step(LoopStep(2, 1, 2))
    rescue.begin_step()
    asyncio.run(rescue.save_after_error())
    assert not checkpoints.heads and not said


@pytest.mark.parametrize(("total_steps", "exports"), [(9, 0), (3, 1)])
def test_after_an_error_the_step_is_saved_without_its_engines_and_the_last_one_exported(
    tmp_path: Path, total_steps: int, exports: int,
) -> None:
    checkpoints = Checkpoints()
    rescue, said = rescue_of(tmp_path, checkpoints, total_steps=total_steps)
    rescue.end_step(STEP)
    asyncio.run(rescue.save_after_error())
    assert (checkpoints.unproven, checkpoints.exports) == ([True], exports)
    assert said == ["the run ends after step 3, of which a checkpoint is saved"]


def test_a_rescue_that_fails_is_noted_and_hides_no_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    rescue, said = rescue_of(tmp_path, checkpoints)
    rescue.end_step(STEP)
    checkpoints.full = True
    asyncio.run(rescue.save_after_error())
    assert said == ["not_saved: no checkpoint of step 3 could be saved: no space left on device"]


def test_after_an_error_a_step_is_recorded_before_it_is_saved_with_the_statistics_of_the_row_that_is_not_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    rescue, _ = rescue_of(tmp_path, checkpoints)
    when: list[bool] = []

    async def record() -> None:
        when.append(checkpoints.has(3))
        rescue.unwritten = {"train/loss": 0.5}

    rescue.end_step(STEP)
    rescue.left = record
    asyncio.run(rescue.save_after_error())
    assert when == [False] and checkpoints.unevaluated == [{"train/loss": 0.5}]
