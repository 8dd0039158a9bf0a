"""What the loop is given, whatever the mode: trainers, publisher, rollouts, and the peers that run the same loop beside it.

Single-controller mode fills it with groups of workers and `Solo` peers; SPMD mode (`cluster.spmd`) with this rank's engine and the other
ranks. The loop calls the same methods in the same order on every rank and has no branch on the mode. Torch-free.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from offbeat.cluster.material import Material
from offbeat.cluster.trainers import Trainers
from offbeat.config.root import Config
from offbeat.data.batch import Batch
from offbeat.data.dataset import PromptStream
from offbeat.data.row import Row
from offbeat.data.trajectory import Group
from offbeat.fleet.publication import PublishReport
from offbeat.fleet.publishers import OnServed
from offbeat.inference.sampling import Sampling
from offbeat.telemetry.record import RunRecord
from offbeat.telemetry.tracker import StatsPart
from offbeat.types import Version

T = TypeVar("T")




class Publishing(Protocol):
    """Carries the trainers' weights to the engines. In SPMD mode every rank calls the same methods."""

    async def publish(self, version: Version, *, on_served: OnServed) -> PublishReport | None:
        """Write the weights as `version` and bring every healthy engine to it. Engines may still be loading it when this returns.

        Args:
            on_served: hears the report when engines serve the version; on ranks that wait for rank 0 to write an adapter, it is never
                called: they roll nothing out.

        Returns:
            The report, if engines serve the version by now.
        """
        ...

    async def settle(self) -> None:
        """Return when engines serve what was published last. Not collective: only the process that brings it to them waits."""
        ...


class Rollouts(Protocol):
    """Asynchronous rollouts over one prompt stream; see `offbeat.rollout.executor.RolloutExecutor`."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def in_flight(self) -> tuple[str, ...]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def prepare_batch(self) -> list[Group]: ...

    def advance(self, version: Version) -> None: ...

    def take_stats(self) -> StatsPart: ...

    async def rollout_batch(self, rows: Iterable[Row], *, group_size: int, sampling: Sampling) -> list[Group]: ...


class Stage(Protocol):
    """Where this process plays rollouts and draws data."""

    def rollouts(self, stream: PromptStream, *, version: Version, last_version: Version) -> Rollouts:
        """Rollouts that feed the training steps from `version` to `last_version`."""
        ...

    def sft_batch(self, stream: PromptStream, count: int) -> Batch:
        """The next `count` rows as supervised sequences."""
        ...


class Peers(Protocol):
    """The processes that run the same loop, this one included. Every one calls the same method under the same name."""

    async def lead(self, name: str, work: Callable[[], Awaitable[T]], kind: Any) -> T:
        """The leader does `work`, and everyone gets what it gave, of type `kind`."""
        ...

    async def gather(self, name: str, value: T) -> list[T]:
        """Everyone's value, by rank; a frozen dataclass."""
        ...

    async def meet(self, name: str) -> None:
        """Return when everyone is here and its device is idle."""
        ...


class Solo:
    """The peers of a controller: none. It has no device and no group, so there is nothing to wait for."""

    async def lead(self, name: str, work: Callable[[], Awaitable[T]], kind: Any) -> T:  # noqa: ARG002
        """See `Peers.lead`."""
        return await work()

    async def gather(self, name: str, value: T) -> list[T]:  # noqa: ARG002
        """See `Peers.gather`."""
        return [value]

    async def meet(self, name: str) -> None:
        """See `Peers.meet`."""


@dataclass(frozen=True)
class Session:
    """One process's part of a run.

    Attributes:
        config: limits in [rollout] and [sft] are this process's share.
        watch: runs beside the loop until cancelled; raises when the run cannot go on, because of engines.
        num_heads: processes that draw data and roll out.
        head: which of them's data this process goes on with; 0 where it draws none.
    """

    config: Config
    record: RunRecord
    material: Material
    trainers: Trainers
    publisher: Publishing
    stage: Stage
    peers: Peers
    watch: Callable[[], Coroutine[Any, Any, None]]
    num_heads: int = 1
    head: int = 0
