"""Keeps engines in service: it probes them and brings quarantined ones back. It runs beside the loop until it is cancelled.

    _care   one per engine; consumes time and quarantines; produces probes and, for a quarantined engine, attempts to heal it; woken by the
            interval and by the engine's quarantine; waits for nothing without a deadline

An engine that is dead, stopped, paused by somebody else or hangs is quarantined within `probe_interval_s` plus the pool's probe timeout, or
at the first request that it fails. It is resumed if it is paused and healed by a reload, and if that fails by a restart and a reload. It
never serves before it has proven itself.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from offbeat.errors import OffbeatError, describe
from offbeat.fleet.listener import FleetListener
from offbeat.fleet.members import State
from offbeat.fleet.pool import EnginePool
from offbeat.inference.client import EngineClient
from offbeat.types import Version

_MAX_BACKOFF_S = 30.0

_log = logging.getLogger(__name__)


class Healer:
    """Probes and heals every engine of a pool, each in a task of its own."""

    def __init__(
        self, pool: EnginePool, *, reload: Callable[[EngineClient], Awaitable[Version | None]],
        restart: Callable[[str], Awaitable[str]] | None = None, probe_interval_s: float, probe_timeout_s: float,
        max_backoff_s: float = _MAX_BACKOFF_S, listener: FleetListener | None = None,
    ) -> None:
        """Prepare to look after all engines of the pool.

        Args:
            reload: brings an engine to the weights or adapters that are current when it returns, and returns the version of its whole
                weights, or None before the first publication; see `WeightsPublisher.bring` and `AdapterCache.refill`. Its waits have
                deadlines.
            restart: ends the process of the engine of that name, starts another and returns its URL, such as "http://127.0.0.1:41873"; None
                where the run did not start the engines. Its waits have deadlines.
            max_backoff_s: longest pause between two attempts.
            listener: hears of "heal_attempt" (engine, attempt, by, reason, seconds) for each reload and restart, where the reason is
                empty if it succeeded, and of "healed" (engine, attempts, seconds).
        """
        self._pool = pool
        self._reload_engine = reload
        self._restart_engine = restart
        self._probe_interval_s = probe_interval_s
        self._probe_timeout_s = probe_timeout_s
        self._max_backoff_s = max_backoff_s
        self._listener = FleetListener() if listener is None else listener

    async def run(self) -> None:
        """Probe and heal every engine until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name in self._pool.states:
                tasks.create_task(self._care(name), name=f"care of {name}")

    async def _care(self, name: str) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._probe_interval_s):
                    await self._pool.wait_quarantined(name)
            if self._pool.states[name] is not State.QUARANTINED:
                await self._pool.examine(name)
            if self._pool.states[name] is State.QUARANTINED:
                await self._heal(name)

    async def _heal(self, name: str) -> None:
        """Try to heal an engine until it serves. This has no deadline of its own, because requests and publishes that need it have one."""
        start = time.monotonic()
        self._pool.mark_healing(name)
        for attempt in itertools.count(1):
            async with self._pool.members[name].held:  # not while the train ranks have its device
                healed = await self._succeeds("reload", self._reload(name), name, attempt)
                if not healed and self._restart_engine is not None and await self._succeeds("restart", self._restart(name), name, attempt):
                    healed = await self._succeeds("reload", self._reload(name), name, attempt)
            if healed:
                self._listener.event("healed", engine=name, attempts=attempt, seconds=round(time.monotonic() - start, 3))
                return
            await asyncio.sleep(min(self._probe_interval_s * 2 ** (attempt - 1), self._max_backoff_s))

    async def _succeeds(self, by: str, act: Awaitable[None], name: str, attempt: int) -> bool:
        start = time.monotonic()
        reason = ""
        try:
            await act
        except OffbeatError as exc:
            reason = str(exc)
        except Exception as exc:  # concerns this engine alone, such as an OSError of the disk of its weights
            _log.exception("%s was not healed by a %s", name, by)
            reason = describe(exc)
        self._listener.event("heal_attempt", engine=name, attempt=attempt, by=by, reason=reason, seconds=round(time.monotonic() - start, 3))
        return not reason

    async def _reload(self, name: str) -> None:
        client = self._pool.client(name)
        # A dead or stopped engine fails this sooner than it would miss the deadline of a reload.
        told = await client.health(timeout_s=self._probe_timeout_s)
        if told.get("paused"):
            await client.resume(timeout_s=self._probe_timeout_s)
        version = await self._reload_engine(client)
        self._pool.restore(name, version)  # at once: nothing may be published between the proof and this

    async def _restart(self, name: str) -> None:
        assert self._restart_engine is not None, "these engines are not ours to restart"
        self._pool.mark_healing(name, url=await self._restart_engine(name))
