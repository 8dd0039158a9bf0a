"""Outcomes of prompts and samples: kinds of reasons, who is drawn again, shares and warnings. Pure; driven by the executor."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

from offbeat.data.trajectory import UNUSABLE, Group, Trajectory, Unusable
from offbeat.errors import CodeError, DeadlineError, RefusedError, RewardError, RunError, TooLongError, WorkerError
from offbeat.journal.records import CallEntry
from offbeat.raised import describe_at
from offbeat.telemetry.tracker import StatsPart
from offbeat.types import Version

Kind = Literal["reward failed", "too long", "timed out", "engine failed", "code failed", "prompt refused", "not accepted", "equal rewards"]
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != "equal rewards")
"""Kinds with a metric of their own; `DynamicSampling` counts groups of equal rewards."""

ON_PURPOSE: tuple[Kind, ...] = ("not accepted", "equal rewards")
"""Kinds of groups that are refused although nothing failed."""

WARN_SHARE = 0.05
_FEWEST = 20
"""Smallest number of prompts or samples for which a share is meaningful."""


@dataclass(frozen=True)
class Settled:
    """How a group ended that is not trained on; recorded in the event log.

    Attributes:
        kind: the reason in two words.
        drawn_again: whether its prompt is drawn again.
        played: the group as it was played; None if it was cancelled before its end.
    """

    prompt_id: str
    rejected: str
    kind: Kind | Literal["too stale"]
    drawn_again: bool = False
    played: Group | None = field(default=None, compare=False, repr=False)


class RolloutListener:
    """Hears of the rollouts of a run; this one ignores all of it."""

    def on_drawn(self, prompt_id: str, version: Version) -> None:
        """Take note of a prompt whose group is admitted while engines serve a version."""

    def on_finished(self, group: Group) -> None:
        """Take note of a group that is ready to be trained on."""

    def on_rejected(self, settled: Settled) -> None:
        """Take note of a group that is not trained on."""

    def on_unusable(self, prompt_id: str, reasons: Sequence[str]) -> None:
        """Take note of the episodes of a prompt that are not trained on, where others of its group are."""

    def on_heard(self, call: CallEntry) -> None:
        """Take note of an answered call of a group that still runs."""

    def on_played_again(self, prompt_id: str, *, num_again: int, num_left: int, num_tokens: int) -> None:
        """Take note of a group of an earlier process that was played again.

        Args:
            num_again: calls that were answered as before.
            num_left: answers, or beginnings of some, for which it did not ask again.
            num_tokens: tokens of unfinished samples from which it went on.
        """

    def on_played_anew(self, prompt_id: str, reason: str) -> None:
        """Take note of a group whose answers of an earlier process cannot be used."""

    def warn(self, text: str) -> None:
        """Take a warning, such as that too many prompts or samples are lost for one reason."""


class GroupListener(Protocol):
    """Hears of groups that are played outside of the gate."""

    def on_played(self, group: Group) -> None:
        """Take note of a group that has ended."""
        ...


@dataclass(frozen=True)
class GroupFailure:
    """Why a group failed. Trying `again` may help where engines, deadlines, rewards or samples failed, not if the prompt is unfit."""

    error: Exception
    kind: Kind
    again: bool = True

    @property
    def is_ours(self) -> bool:
        """Whether an engine, a deadline or a reward process failed by chance, rather than user code or the request itself."""
        return isinstance(self.error, RunError) and not isinstance(self.error, RefusedError)


def failure_of(error: Exception) -> GroupFailure:
    """Return the failure of a group that was played."""
    return GroupFailure(error, _kind_of(error))


def failure_to_ask(error: Exception) -> GroupFailure:
    """Return the failure of a prompt for which no episode could be made."""
    return GroupFailure(error, "too long" if isinstance(error, TooLongError) else "prompt refused", again=False)


def _kind_of(error: Exception) -> Kind:
    match error:
        case TooLongError():
            return "too long"
        case RewardError() | WorkerError():  # rollouts wait for no other workers than reward processes
            return "reward failed"
        case DeadlineError():
            return "timed out"
        case RunError():
            return "engine failed"
        case _:
            return "code failed"


def screen(group: Group, failure: GroupFailure | None, *, fewest: int = 2) -> tuple[Group, GroupFailure | None]:
    """Fail a played group if fewer than two of its episodes can be trained on, because a single one has no baseline."""
    if failure is not None or len(group.usable_episodes) >= min(fewest, len(group.episodes)):
        return group, failure
    unusable = [t for t in group.verdicts if t.unusable is not None]
    why = f"{len(unusable)} of {len(group.episodes)} samples cannot be trained on; the first: {unusable[0].reason}"
    error = {"too long": TooLongError, "reward failed": RewardError}.get(str(unusable[0].unusable), CodeError)(why)
    return replace(group, trajectories=(), rejected=why), failure_of(error)


def unwrap(exc: BaseException) -> Exception:
    """Unwrap the exception groups of a workflow's task groups, to recognize an engine's failure; errors of user code come first."""
    while isinstance(exc, BaseExceptionGroup):
        exc = next((each for each in exc.exceptions if not isinstance(each, RunError)), exc.exceptions[0])
    return exc if isinstance(exc, Exception) else CodeError(describe_at(exc))


class Outcomes:
    """Counts settled prompts and played samples, since the last `take_stats` and since the start."""

    def __init__(self, listener: RolloutListener | None = None) -> None:
        """`listener` is warned once of each kind of reason that has cost more than `WARN_SHARE` of all prompts, or of all samples."""
        self._listener = listener or RolloutListener()
        self._warned: set[str] = set()
        self._prompts, self._step_prompts = Lost(), Lost()
        self._samples, self._step_samples = Lost(), Lost()
        self._num_drawn_again = self._num_requeued = 0

    def played(self, prompt_id: str, trajectories: Iterable[Trajectory]) -> None:
        """Count the episodes of a group that has ended, an unusable one by its reason."""
        for trajectory in trajectories:
            kind = trajectory.unusable
            self._step_samples.count(kind)
            self._samples.count(kind, example=f"of prompt {prompt_id}: {trajectory.reason}")
            if kind is not None:
                self._warn_of(kind, self._samples, "samples cannot be trained on")

    def settled(self, prompt_id: str, kind: Kind | None, reason: str = "") -> None:
        """Count a prompt that is ready to be trained on, or that was rejected because of `kind`."""
        self._step_prompts.count(kind)
        self._prompts.count(kind, example=f"{prompt_id}: {reason}")
        if kind is not None and kind not in ON_PURPOSE:
            self._warn_of(kind, self._prompts, "prompts were rejected")

    def drawn_again(self) -> None:
        """Count a prompt that failed and is drawn again."""
        self._num_drawn_again += 1

    def requeued(self) -> None:
        """Count a prompt whose group was cancelled because it would have become too stale, and that is drawn again."""
        self._num_requeued += 1

    def take_stats(self) -> StatsPart:
        """Return the shares of settled prompts and of played samples since the last call."""
        prompts, samples = self._step_prompts, self._step_samples
        means = prompts.shares("rollout/rejected", KINDS) | samples.shares("rollout/unusable", UNUSABLE)
        if not self._samples.lost["episode failed"]:  # nothing but agents can
            del means["rollout/unusable_episode_failed_share"]
        sums = {"rollout/drawn_again_prompts": float(self._num_drawn_again), "rollout/requeued_prompts": float(self._num_requeued)}
        self._step_prompts, self._step_samples, self._num_drawn_again, self._num_requeued = Lost(), Lost(), 0, 0
        return StatsPart(sums=sums, means=means)

    def _warn_of(self, kind: Kind | Unusable, counted: "Lost", what: str) -> None:
        share = counted.lost[kind] / counted.total
        if counted.total >= _FEWEST and share > WARN_SHARE and f"{what} {kind}" not in self._warned:
            self._warned.add(f"{what} {kind}")
            self._listener.warn(
                f"{counted.lost[kind]} of {counted.total} {what}: {kind} ({share:.0%}); training is biased against them. The first,"
                f" {counted.examples[kind]:.300}")


class Lost:
    """Counts how many of a total were lost, by kind, and keeps the first example of each kind."""

    def __init__(self) -> None:
        self.total = 0
        self.lost: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def count(self, kind: str | None, *, example: str = "") -> None:
        """Count one more, lost because of `kind`, or not lost if that is None."""
        self.total += 1
        if kind is not None:
            self.lost[kind] += 1
            self.examples.setdefault(kind, example)

    def shares(self, name: str, kinds: Iterable[str]) -> dict[str, tuple[float, float]]:
        """Return the lost share, in total and by kind, as means for `StatsPart`: pairs of the number lost and the total."""
        shares = {f"{name}_share": (float(self.lost.total()), float(self.total))}
        return shares | {f"{name}_{kind.replace(' ', '_')}_share": (float(self.lost[kind]), float(self.total)) for kind in kinds}
