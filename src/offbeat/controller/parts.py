"""The arguments of the loop, in every mode: trainers, publisher, rollouts, and the peers that run the same loop beside it.

Single-controller mode fills it with groups of workers and `SingleProcess` peers; SPMD mode (`spmd.rank`) with this rank's trainer and the
other ranks. The loop calls the same methods in the same order on every rank and has no branch on the mode. Torch-free.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from offbeat.config.root import Config
from offbeat.controller.inputs import RunInputs
from offbeat.controller.teaching import Teacher
from offbeat.data.batch import Batch
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream
from offbeat.data.trajectory import Group
from offbeat.fleet.publishers import OnServed
from offbeat.fleet.turns import Settling
from offbeat.inference.sampling import Sampling
from offbeat.journal.records import CallEntry
from offbeat.journal.run_journal import NoJournal
from offbeat.journal.standing import HeldGroups
from offbeat.ranks.trainers import Trainers
from offbeat.rollout.outcomes import GroupListener
from offbeat.telemetry.record import RunRecord
from offbeat.telemetry.tracker import StatsPart
from offbeat.types import Version

T = TypeVar("T")


class Publishing(Protocol):
    """Carries the trainers' weights to the engines. In SPMD mode every rank calls the same methods."""

    async def publish(self, version: Version, *, on_served: OnServed) -> None:
        """Write the weights as `version`, and let every healthy engine come to it. Engines may still be loading it when this returns.

        `on_served` is called with the report when engines serve the version, in the order of versions; never on ranks without rollouts.
        """
        ...

    async def settle(self, *, behind: int = 0) -> None:
        """Return when engines serve the version published last, or the one `behind` versions before it.

        Not collective: only the process that brings it to them waits. Raises the error of a publish that has failed since.
        """
        ...

    async def watch(self) -> None:
        """Raise as soon as a running publish fails; for waits that would then last for ever."""
        ...


class DeviceTurns(Protocol):
    """Whose turn it is on devices that engines and ranks share. Ranks may compute after `to_ranks`; the next publish ends their turn."""

    async def to_ranks(self, publisher: Settling) -> None:
        """Wait until engines serve the published version, and put them to sleep. Does nothing if they sleep already.

        Not collective: only the process that owns the engines waits.
        """
        ...

    def take_metrics(self) -> dict[str, float]:
        """Return how long the turns since the last call took, as metrics."""
        ...


class NoTurns:
    """The `DeviceTurns` of engines and ranks that compute at the same time."""

    async def to_ranks(self, publisher: Settling) -> None:
        """See `DeviceTurns.to_ranks`."""

    def take_metrics(self) -> dict[str, float]:
        return {}


class Rollouts(Protocol):
    """Asynchronous rollouts over one prompt stream; see `offbeat.rollout.executor.RolloutExecutor`."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def in_flight(self) -> tuple[str, ...]: ...

    @property
    def held(self) -> tuple[Group, ...]: ...

    @property
    def num_tries(self) -> Mapping[str, int]: ...

    @property
    def calls(self) -> Sequence[CallEntry]: ...

    def take_over(self, held: HeldGroups) -> None: ...

    @property
    def num_flat_rejected(self) -> int: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def prepare_batch(self) -> list[Group]: ...

    async def take_ahead(self) -> list[Group]: ...

    @property
    def has_ahead(self) -> bool: ...

    def advance(self, version: Version) -> None: ...

    def serve(self, version: Version) -> None: ...

    def take_stats(self) -> StatsPart: ...

    async def rollout_batch(
        self, rows: Iterable[Row], *, group_size: int, sampling: Sampling, listener: GroupListener | None = None,
    ) -> list[Group]: ...


class RolloutSource(Protocol):
    """Where this process plays rollouts and draws data."""

    @property
    def draws(self) -> bool:
        """Whether this process draws data itself; other ranks get their share of every batch from the one that does."""
        ...

    def rollouts(self, stream: PromptStream, *, version: Version, last_version: Version, num_flat_rejected: int = 0) -> Rollouts:
        """Return the rollouts that feed the training steps from `version` to `last_version`.

        `num_flat_rejected` are the groups that dynamic sampling has rejected already for the first of these steps.
        """
        ...

    def rollouts_of_set(self, name: str) -> Rollouts:
        """Return the rollouts of an evaluation set, for `rollout_batch` alone."""
        ...

    def sft_batch(self, stream: PromptStream, count: int) -> Batch:
        """Return the next `count` rows as supervised sequences."""
        ...


class LoopPeers(Protocol):
    """All processes that run the same loop, including this one. All of them call the same method under the same name."""

    async def lead(self, name: str, work: Callable[[], Awaitable[T]], kind: Any) -> T:
        """Let the leader do `work`; returns its result, of type `kind`, to every process."""
        ...

    async def gather(self, name: str, value: T) -> list[T]:
        """Return the values of all processes, frozen dataclasses, by rank."""
        ...

    async def meet(self, name: str) -> None:
        """Return when all processes have come and their devices are idle."""
        ...

    async def all_ready(self, name: str, work: Callable[[], Awaitable[T | None]]) -> T | None:
        """Return the result of `work`, which sets its own deadline; None if it is None in any process. If it fails in one, all raise."""
        ...

    def have_heard(self, error: BaseException) -> bool:
        """Whether all processes have raised an error at the same point, so that they can still do something together."""
        ...


class SingleProcess:
    """The `LoopPeers` of a controller: none. It has no device and no group, so there is nothing to wait for."""

    async def lead(self, name: str, work: Callable[[], Awaitable[T]], kind: Any) -> T:  # noqa: ARG002
        return await work()

    async def gather(self, name: str, value: T) -> list[T]:  # noqa: ARG002
        return [value]

    async def meet(self, name: str) -> None:
        """See `LoopPeers.meet`."""

    async def all_ready(self, name: str, work: Callable[[], Awaitable[T | None]]) -> T | None:  # noqa: ARG002
        return await work()

    def have_heard(self, error: BaseException) -> bool:  # noqa: ARG002
        return True


@dataclass(frozen=True)
class RunParts:
    """One process's part of a run.

    Attributes:
        config: limits in [rollout] and [sft] are this process's share.
        watch: runs beside the loop until cancelled; raises when the run cannot go on, because of engines.
        num_heads: number of processes that draw data and roll out.
        head: index of the head whose data this process continues with; 0 if it draws none.
        critic: the same ranks as trainers of the critic, if the algorithm has one.
    """

    config: Config
    record: RunRecord
    inputs: RunInputs
    trainers: Trainers
    publisher: Publishing
    source: RolloutSource
    peers: LoopPeers
    watch: Callable[[], Coroutine[Any, Any, None]]
    num_heads: int = 1
    head: int = 0
    critic: Trainers | None = None
    teacher: Teacher | None = None
    turns: DeviceTurns = field(default_factory=NoTurns)
    journal: NoJournal = field(default_factory=NoJournal)
