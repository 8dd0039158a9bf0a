"""`Run.replay`: `offbeat replay` from a Python program or a notebook."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.api.sentence import short_errors
from offbeat.api.session import run_alone
from offbeat.loading import load_module

if TYPE_CHECKING:
    from offbeat.controller.step_replay import ReplayedStep


@dataclass
class Replayed:
    """What came of a replay.

    Attributes:
        steps: the steps that were trained again, each with its `global_step`, `is_equal`, and the first `difference` as a sentence.
        remarks: sentences on what is missing, or differs from how the run was made.
    """

    steps: list["ReplayedStep"] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether all steps came out equal, bit for bit."""
        return all(step.is_equal for step in self.steps)


@dataclass(frozen=True)
class _Collected:
    """Hears how a replay goes on."""

    replayed: Replayed

    def compared(self, step: "ReplayedStep") -> None:
        self.replayed.steps.append(step)

    def remark(self, text: str) -> None:
        self.replayed.remarks.append(text)


@short_errors
def replay_run(folder: Path, *, from_step: int | None, to_step: int | None, live_groups: int | None) -> Replayed:
    """Replay the run in a folder; see `Run.replay`."""
    recorded = load_module("offbeat.runs.recorded_run")  # of the extra `train`, which a run that is only read does not need
    replayed = Replayed()
    config = recorded.recorded_config(folder)
    alone = config.model_copy(update={"run": config.run.model_copy(update={"mode": "controller"})})
    run_alone(lambda _console: recorded.replay(folder, _Collected(replayed), first=from_step, last=to_step, live_groups=live_groups), alone)
    return replayed
