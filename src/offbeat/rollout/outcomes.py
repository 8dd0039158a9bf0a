"""What becomes of prompts and samples, and why: kinds of reasons, who is drawn again, shares and warnings. Pure; the executor drives it."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, get_args

from offbeat.data.trajectory import Trajectory
from offbeat.errors import DataError, DeadlineError, ModelError, RefusedError, RewardError, RunError, TooLongError, WorkerError
from offbeat.telemetry.tracker import StatsPart

Kind = Literal["reward failed", "too long", "timed out", "engine failed", "code failed", "prompt refused", "not accepted"]
KINDS: tuple[Kind, ...] = get_args(Kind)

WARN_SHARE = 0.05
_FEWEST = 20
"""A share of fewer says nothing."""


def kind_of(failure: Exception) -> Kind:
    """Why a group failed, in two words."""
    match failure:
        case TooLongError():
            return "too long"
        case RewardError() | WorkerError():  # the only workers that rollouts wait for are reward processes
            return "reward failed"
        case DeadlineError():
            return "timed out"
        case RunError():
            return "engine failed"
        case DataError() | ModelError():
            return "prompt refused"
        case _:
            return "code failed"


def is_ours(failure: Exception) -> bool:
    """Whether another try may succeed: engines, deadlines and reward processes fail by chance, user code and wrong requests do not."""
    return isinstance(failure, RunError) and not isinstance(failure, RefusedError)


class Outcomes:
    """Counts prompts that are settled and samples that were played, since the last `take` and since the start."""

    def __init__(self, warn: Callable[[str], None] = lambda _text: None) -> None:
        """`warn` hears once of every kind that more than `WARN_SHARE` of all prompts, or of all samples, were lost to since the start."""
        self._warn = warn
        self._warned: set[str] = set()
        self._prompts = Lost()
        self._samples = Lost()
        self._step = Lost()
        self._num_drawn_again = 0

    def played(self, trajectories: Iterable[Trajectory]) -> None:
        """A group has ended with these."""
        for trajectory in trajectories:
            self._samples.count(trajectory.unusable)
            if trajectory.unusable is not None:
                self._warn_of(trajectory.unusable, self._samples, "samples cannot be trained on", trajectory.reason)

    def settled(self, kind: Kind | None, reason: str = "") -> None:
        """A prompt is ready to be trained on, or was rejected because of `kind`."""
        self._step.count(kind)
        self._prompts.count(kind)
        if kind is not None and kind != "not accepted":  # which is what the user asked for
            self._warn_of(kind, self._prompts, "prompts were rejected", reason)

    def drawn_again(self) -> None:
        """A prompt has failed and is drawn again."""
        self._num_drawn_again += 1

    def take(self) -> StatsPart:
        """Shares of the prompts that were settled since the last call."""
        total, lost = self._step.total, self._step.lost
        means = {"rollout/rejected_share": (float(lost.total()), float(total))}
        means |= {f"rollout/rejected_{kind.replace(' ', '_')}_share": (float(lost[kind]), float(total)) for kind in KINDS}
        part = StatsPart(sums={"rollout/drawn_again_prompts": float(self._num_drawn_again)}, means=means)
        self._step, self._num_drawn_again = Lost(), 0
        return part

    def _warn_of(self, kind: Kind, counted: "Lost", what: str, reason: str) -> None:
        share = counted.lost[kind] / counted.total
        if counted.total >= _FEWEST and share > WARN_SHARE and f"{what} {kind}" not in self._warned:
            self._warned.add(f"{what} {kind}")
            self._warn(
                f"{counted.lost[kind]} of {counted.total} {what}: {kind} ({share:.0%}); what is learnt is biased against them. The last:"
                f" {reason:.200}")


class Lost:
    """How many of a total were lost, by kind."""

    def __init__(self) -> None:
        self.total = 0
        self.lost: Counter[str] = Counter()

    def count(self, kind: str | None) -> None:
        """One more, lost because of `kind` or not lost."""
        self.total += 1
        if kind is not None:
            self.lost[kind] += 1
