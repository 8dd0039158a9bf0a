"""What becomes of prompts and samples, and why: kinds of reasons, who is drawn again, shares and warnings. Pure; the executor drives it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from offbeat.data.trajectory import UNUSABLE, Trajectory, Unusable
from offbeat.errors import DeadlineError, RefusedError, RewardError, RunError, TooLongError, WorkerError
from offbeat.telemetry.tracker import StatsPart

Kind = Literal["reward failed", "too long", "timed out", "engine failed", "code failed", "prompt refused", "not accepted"]
KINDS: tuple[Kind, ...] = get_args(Kind)

WARN_SHARE = 0.05
_FEWEST = 20
"""A share of fewer says nothing."""


@dataclass(frozen=True)
class Failure:
    """Why a group failed.

    Attributes:
        again: whether another try may succeed: engines, deadlines, rewards and samples differ each time, a prompt that cannot be asked
            does not.
    """

    error: Exception
    kind: Kind
    again: bool = True

    @property
    def is_ours(self) -> bool:
        """Whether it was neither user code's nor the request's, but an engine, a deadline or a reward process that failed by chance."""
        return isinstance(self.error, RunError) and not isinstance(self.error, RefusedError)


def failure_of(error: Exception) -> Failure:
    """Of a group that was played."""
    return Failure(error, _kind_of(error))


def failure_to_ask(error: Exception) -> Failure:
    """Of a prompt of which no episode could be made."""
    return Failure(error, "too long" if isinstance(error, TooLongError) else "prompt refused", again=False)


def _kind_of(error: Exception) -> Kind:
    match error:
        case TooLongError():
            return "too long"
        case RewardError() | WorkerError():  # the only workers that rollouts wait for are reward processes
            return "reward failed"
        case DeadlineError():
            return "timed out"
        case RunError():
            return "engine failed"
        case _:
            return "code failed"


class Outcomes:
    """Counts prompts that are settled and samples that were played, since the last `take` and since the start."""

    def __init__(self, warn: Callable[[str], None] = lambda _text: None) -> None:
        """`warn` hears once of every kind that more than `WARN_SHARE` of all prompts, or of all samples, were lost to since the start."""
        self._warn = warn
        self._warned: set[str] = set()
        self._prompts, self._step_prompts = Lost(), Lost()
        self._samples, self._step_samples = Lost(), Lost()
        self._num_drawn_again = 0

    def played(self, prompt_id: str, trajectories: Iterable[Trajectory]) -> None:
        """A group has ended with these."""
        for trajectory in trajectories:
            kind = trajectory.unusable
            self._step_samples.count(kind)
            self._samples.count(kind, example=f"of prompt {prompt_id}: {trajectory.reason}")
            if kind is not None:
                self._warn_of(kind, self._samples, "samples cannot be trained on")

    def settled(self, prompt_id: str, kind: Kind | None, reason: str = "") -> None:
        """A prompt is ready to be trained on, or was rejected because of `kind`."""
        self._step_prompts.count(kind)
        self._prompts.count(kind, example=f"{prompt_id}: {reason}")
        if kind is not None and kind != "not accepted":  # which is what the user asked for
            self._warn_of(kind, self._prompts, "prompts were rejected")

    def drawn_again(self) -> None:
        """A prompt has failed and is drawn again."""
        self._num_drawn_again += 1

    def take(self) -> StatsPart:
        """Shares of the prompts that were settled, and of the samples that were played, since the last call."""
        prompts, samples = self._step_prompts, self._step_samples
        means = prompts.shares("rollout/rejected", KINDS) | samples.shares("rollout/unusable", UNUSABLE)
        part = StatsPart(sums={"rollout/drawn_again_prompts": float(self._num_drawn_again)}, means=means)
        self._step_prompts, self._step_samples, self._num_drawn_again = Lost(), Lost(), 0
        return part

    def _warn_of(self, kind: Kind | Unusable, counted: "Lost", what: str) -> None:
        share = counted.lost[kind] / counted.total
        if counted.total >= _FEWEST and share > WARN_SHARE and f"{what} {kind}" not in self._warned:
            self._warned.add(f"{what} {kind}")
            self._warn(
                f"{counted.lost[kind]} of {counted.total} {what}: {kind} ({share:.0%}); what is learnt is biased against them. The first,"
                f" {counted.examples[kind]:.300}")


class Lost:
    """How many of a total were lost, by kind, and the first of each."""

    def __init__(self) -> None:
        self.total = 0
        self.lost: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def count(self, kind: str | None, *, example: str = "") -> None:
        """One more, lost because of `kind` or not lost."""
        self.total += 1
        if kind is not None:
            self.lost[kind] += 1
            self.examples.setdefault(kind, example)

    def shares(self, name: str, kinds: Iterable[str]) -> dict[str, tuple[float, float]]:
        """What was lost in all and by kind, with the total: means for `StatsPart`."""
        shares = {f"{name}_share": (float(self.lost.total()), float(self.total))}
        return shares | {f"{name}_{kind.replace(' ', '_')}_share": (float(self.lost[kind]), float(self.total)) for kind in kinds}
