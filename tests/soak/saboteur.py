"""Hurts engines and adapters, one after the other, seeded, and waits each time until all is well again.

Engines are processes of this run, reached by signals. Adapters are damaged after their tenant has written them, before engines read them.
"""

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

from offbeat.fleet.fleet import Fleet
from offbeat.model.peft_io import CONFIG_FILE, WEIGHTS_FILE
from offbeat.runs.adapters import Adapters
from soak.ledger import ENGINE_FAULTS, Fault, Ledger
from soak.work import Work
from waiting import until

STOPPED_S = 10.0
SLOW_S, SLOW_BEAT_S, SLOW_SHARE = 6.0, 0.25, 0.8
"""A slowed engine is stopped for this share of each beat."""
PAUSE_S = 2.0
HEAL_LIMIT_S = 90.0


class FaultInjector:
    """Works until the time is over, or until it is told to stop."""

    def __init__(
        self, adapters: Adapters, work: Work, ledger: Ledger, *, kinds: tuple[str, ...], seed: int, pause_s: float = PAUSE_S,
        never_killed: str = "",
    ) -> None:
        """`never_killed` names an engine whose process lasts; it is slowed alone, since one that is stopped is replaced."""
        self.stop = asyncio.Event()
        self._pause_s = pause_s
        self._never_killed = never_killed
        self._adapters = adapters
        self._serving: Fleet = adapters.fleet
        self._work = work
        self._ledger = ledger
        self._kinds = kinds
        self._rng = random.Random(seed)

    async def run(self, *, until_s: float) -> None:
        """Every kind of fault in turn, at least once, and anew until `time.monotonic()` is `until_s`; `stop` ends it after a fault."""
        while True:
            for kind in self._rng.sample(self._kinds, len(self._kinds)):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s):
                        await self.stop.wait()
                if self.stop.is_set():
                    return
                await (self._hurt_engine(kind) if kind in ENGINE_FAULTS else self._hurt_adapter(kind))
            if time.monotonic() >= until_s:
                return

    async def see_all_back(self, after: str) -> None:
        """Wait until all engines are in service; complain if they are not in time."""
        pool = self._serving.pool
        try:
            await until(lambda: len(pool.healthy) == len(pool.states), timeout_s=HEAL_LIMIT_S)
        except TimeoutError:
            states = {name: state.value for name, state in pool.states.items()}
            self._ledger.not_back.append(f"{HEAL_LIMIT_S:g} s after {after}: {states}")

    async def _hurt_engine(self, kind: str) -> None:
        workers = self._serving.engines.workers
        worker = self._rng.choice([worker for worker in workers if kind == "slow" or worker.name != self._never_killed])
        process = psutil.Process(worker.pid)
        self._begin(kind, worker.name)
        await {"kill": self._kill, "stop": self._stop, "slow": self._slow}[kind](process, worker.name)
        await self.see_all_back(f"{kind} of {worker.name}")

    async def _kill(self, process: psutil.Process, engine: str) -> None:
        process.kill()
        with suppress(TimeoutError):  # the ledger sees that nobody noticed
            async with asyncio.timeout(HEAL_LIMIT_S):
                await self._serving.pool.wait_quarantined(engine)

    async def _stop(self, process: psutil.Process, engine: str) -> None:
        async with _stopped(process):
            await asyncio.sleep(STOPPED_S)

    async def _slow(self, process: psutil.Process, engine: str) -> None:
        end_s = time.monotonic() + SLOW_S
        while time.monotonic() < end_s:
            async with _stopped(process):
                await asyncio.sleep(SLOW_SHARE * SLOW_BEAT_S)
            await asyncio.sleep((1 - SLOW_SHARE) * SLOW_BEAT_S)

    async def _hurt_adapter(self, kind: str) -> None:
        tenant = self._rng.choice(self._adapters.names)
        damage = {"corrupt": self._rng.choice((flip_bytes, cut_off)), "rank": change_rank, "missing": remove_file}[kind]
        fault: Fault | None = None

        def at_last(folder: Path) -> None:
            nonlocal fault
            damage(folder)
            fault = self._begin(kind, tenant)

        reason = await self._work.publish(tenant, at_last)
        assert fault is not None, "the tenant has written its adapter"
        if reason:
            fault.noticed_s, fault.reason = time.time() - fault.at_s, reason
        if not await self._work.publish(tenant):
            fault.healed_s = time.time() - fault.at_s

    def _begin(self, kind: str, target: str) -> Fault:
        self._adapters.fleet.record.console.note(f"now: {kind} {target}")
        self._ledger.faults.append(fault := Fault(kind, target, time.time()))
        return fault


@asynccontextmanager
async def _stopped(process: psutil.Process) -> AsyncIterator[None]:
    """Stop a process while the body runs; it may be killed meanwhile."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def flip_bytes(folder: Path) -> None:
    """Numbers in the file become others, not all of them odd ones."""
    file = folder / WEIGHTS_FILE
    data = bytearray(file.read_bytes())
    for at in range(-400, 0, 4):
        data[at] ^= 0xFF  # the low end of a float32: the file loads, and its numbers are almost right
    file.write_bytes(data)


def cut_off(folder: Path) -> None:
    """The file ends early."""
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-256])


def change_rank(folder: Path) -> None:
    """The configuration says another rank than the tensors have."""
    file = folder / CONFIG_FILE
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"r": config["r"] + 1}))


def remove_file(folder: Path) -> None:
    """The tensors are gone."""
    (folder / WEIGHTS_FILE).unlink()
