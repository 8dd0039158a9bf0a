"""Engines that take turns with the train ranks on the same devices: they sleep while the ranks compute. Torch-free.

    to_ranks     consumes engines that serve the last publish; produces free devices; waits for each engine to fall asleep, under a
                 deadline, and for the step of a healing that is under way
    to_engines   consumes weights that are written; produces engines that go on, with the weights of a publish, or where adapters are
                 published, with the base model that they have kept in host memory

An engine that is not seen to sleep has its process ended, as it might hold memory that the ranks need. An engine that has failed is not
healed while it is the ranks' turn. Requests in flight wait in the engines, and their deadlines stand still.
"""

import time
from typing import Protocol

from offbeat.aio import gather_all
from offbeat.errors import OffbeatError
from offbeat.fleet.pool import EnginePool
from offbeat.phase import phase
from offbeat.telemetry.record import RunRecord


class Settling(Protocol):
    """A publisher, of which one waits for the version that it has published last."""

    async def settle(self, *, behind: int = 0) -> None:
        """Return when engines serve the version published last, or the one `behind` versions before it."""
        ...


class EngineProcesses(Protocol):
    """The engines' processes, as an `EngineGroup`."""

    async def end_process(self, name: str) -> None:
        """End the process of an engine, such as "engine 0"."""
        ...


class EngineTurns:
    """Puts the engines of a pool to sleep and has them go on. Implements `controller.parts.DeviceTurns`."""

    def __init__(self, pool: EnginePool, record: RunRecord, *, engines: EngineProcesses, keep_weights: bool, timeout_s: float) -> None:
        """Begin with the engines' turn. Engines that do not `keep_weights` drop them, as they need others when they go on. `timeout_s` is
        for an engine to fall asleep, or to bring its weights back.
        """
        self._pool = pool
        self._record = record
        self._keep_weights = keep_weights
        self._timeout_s = timeout_s
        self._engines = engines
        self._asleep_since_s: float | None = None
        self._metrics: dict[str, float] = {}

    async def to_ranks(self, publisher: Settling) -> None:
        if self._asleep_since_s is not None:
            return
        start_s = time.time()
        await publisher.settle()
        with phase("waiting for engines to fall asleep"):
            await gather_all(self._lay_down(name) for name in self._pool.members)
        self._pool.halt()
        self._asleep_since_s = time.time()
        self._metrics["turns/to_ranks_s"] = self._asleep_since_s - start_s

    async def to_engines(self) -> None:
        """Have engines go on: the ranks do not compute until the next `to_ranks`, and have freed the memory that they can."""
        if self._asleep_since_s is None:
            return
        since_s, woken_s, self._asleep_since_s = self._asleep_since_s, time.time(), None
        if self._keep_weights:
            with phase("waiting for engines to wake"):
                await gather_all(self._wake(name) for name in self._pool.members)
        self._pool.go_on()
        for name, member in self._pool.members.items():
            member.held.release()
            self._record.on_span("asleep", name, since_s, woken_s)
        self._metrics["turns/asleep_s"] = woken_s - since_s
        self._record.events.record("slept", seconds=round(woken_s - since_s, 4), wake_s=round(time.time() - woken_s, 4))

    def take_metrics(self) -> dict[str, float]:
        taken, self._metrics = self._metrics, {}
        return taken

    async def _lay_down(self, name: str) -> None:
        member = self._pool.members[name]
        await member.held.acquire()
        if member.healthy:
            try:
                await member.while_in_service(member.client.sleep(keep_weights=self._keep_weights, timeout_s=self._timeout_s))
                return
            except OffbeatError as exc:
                self._pool.quarantine(name, f"it did not fall asleep: {exc}")
        await self._engines.end_process(name)

    async def _wake(self, name: str) -> None:
        member = self._pool.members[name]
        if member.healthy:
            try:
                await member.while_in_service(member.client.wake(timeout_s=self._timeout_s))
            except OffbeatError as exc:
                self._pool.quarantine(name, f"it did not wake: {exc}")
