"""Tenants at work in one process: all train a few at a time, publish and sample, as often as they can, until the soak is over.

    train     one; consumes batches; produces gradients and steps of a few tenants in turn
    publish   one per tenant; produces versions, and what each has to answer before an engine sees it
    sample    one per tenant; consumes versions; produces samples for the ledger

Each waits for its own calls alone. A call that does not end in `LIMIT_S` is a hang; one that fails although nobody damaged it, a failure.
"""

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean

import numpy as np

from offbeat.algorithms.adam import AdamParams
from offbeat.algorithms.experience import sft_batch
from offbeat.data.batch import Batch
from offbeat.errors import OffbeatError, PublishError
from offbeat.fleet.publication import PublishReport
from offbeat.inference.sampling import Sampling
from offbeat.runs.adapters import Adapters
from offbeat.weights.adapters import adapter_name
from offbeat.weights.protocol import Manifest
from soak.ledger import Ledger
from soak.reference import Reference

Damage = Callable[[Path], None]

PROMPT = (13, 14, 15, 5)
GREEDY = Sampling(8, temperature=0.0)
STEP = AdamParams(lr=1e-2, clip_norm=1.0)
LIMIT_S = 90.0
"""Beyond every deadline of the configuration."""
TOGETHER = 4
"""Tenants in one training step."""
SAMPLE_PAUSE_S, TRAIN_PAUSE_S, PUBLISH_PAUSE_S = 0.05, 0.1, 3.0
OLDER = 0.2
"""Share of requests for a version before the current one."""


class Work:
    """The work of all tenants on `adapters`; leaves its records in `ledger`."""

    def __init__(self, adapters: Adapters, ledger: Ledger, reference: Reference, *, seed: int, pace: float = 1.0) -> None:
        """Pauses last `pace` times as long."""
        self.over = asyncio.Event()
        self._adapters = adapters
        self._ledger = ledger
        self._reference = reference
        self._pace = pace
        self._rng = random.Random(seed)
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._damage: dict[str, Damage] = {}
        self._published: dict[str, list[int]] = defaultdict(list)
        self._steps: Counter[str] = Counter()
        self._fingerprints: dict[str, tuple[int, str]] = {}
        self._steps_before: dict[str, int] = {}
        self._publish_to_engines = adapters.fleet.publisher.publish
        adapters.fleet.publisher.publish = self._on_written

    async def begin(self, count: int) -> None:
        """Add the tenants, and publish each once."""
        for number in range(count):
            await self._adapters.add(f"tenant-{number}", seed=number)
        await self._train(self._adapters.names)
        await asyncio.gather(*(self.publish(name) for name in self._adapters.names))

    async def run(self) -> None:
        """Until it is over."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_training())
            for name in self._adapters.names:
                tasks.create_task(self._keep_publishing(name))
                tasks.create_task(self._keep_sampling(name))

    async def publish(self, tenant: str, damage: Damage | None = None) -> str:
        """Publish; with damage to the folder between its writing and its reading, it must fail. Gives the reason."""
        reason = ""
        async with self._turns[tenant]:
            if damage is not None:
                self._damage[tenant] = damage
            self._steps_before[tenant] = self._steps[tenant]
            try:
                async with self._timed("damaged publish" if damage else "publish", tenant):
                    report = await self._adapters.publish(tenant)
                    self._published[tenant].append(report.version)
                    self._ledger.took("fan-out", report.total_s)
            except PublishError as exc:
                reason = str(exc)
            if bool(reason) != (damage is not None):
                self._ledger.failures.append(f"publish of {tenant}: {reason or 'a damaged adapter is served'}")
        return reason

    async def check_all(self, *, everywhere: bool = True) -> None:
        """Ask every engine for every tenant's current version; unless they are `everywhere`, those engines that hold it."""
        pool, adapters = self._adapters.fleet.pool, self._adapters.fleet.adapters
        for tenant in self._adapters.names:
            version = self._current(tenant)
            name = adapter_name(tenant, version)
            if everywhere and (missing := pool.states.keys() - set(adapters.holders(name))):
                self._ledger.not_back.append(f"{name} is not on {sorted(missing)}")
            for engine in adapters.holders(name):
                (sample,) = await pool.client(engine).generate(PROMPT, GREEDY, n=1, timeout_s=LIMIT_S, adapter=name)
                self._ledger.check_sample(tenant, sample, oldest=version, newest=version, where=f" on {engine}")

    # -- training ----------------------------------------------------------------------------------------------------------------------

    async def _keep_training(self) -> None:
        queue: list[str] = []
        while not self.over.is_set():
            if len(queue) < TOGETHER:
                queue += self._rng.sample(self._adapters.names, len(self._adapters.names))
            chosen = tuple(dict.fromkeys(queue[:TOGETHER]))
            queue = queue[TOGETHER:]
            await self._train(chosen)
            await self._pause(TRAIN_PAUSE_S)

    async def _train(self, names: tuple[str, ...]) -> None:
        self._steps.update(names)
        async with self._timed("train_step", ", ".join(names)):
            await self._adapters.forward_backward({name: self._batch() for name in names})
            await self._adapters.optim_step(dict.fromkeys(names, STEP))
        self._steps.update(names)  # again: a publish in between may have seen either

    def _batch(self) -> Batch:
        rng = np.random.default_rng(self._rng.getrandbits(32))
        return sft_batch([(rng.integers(5, 15, 12).astype(np.int32), np.arange(12) >= 3) for _ in range(3)])

    # -- publishing --------------------------------------------------------------------------------------------------------------------

    async def _keep_publishing(self, tenant: str) -> None:
        while not self.over.is_set():
            await self._pause(self._rng.choice((0.0, 0.5, 1.0, 1.5)) * PUBLISH_PAUSE_S)  # at times again before it was trained
            await self.publish(tenant)

    async def _on_written(self, manifest: Manifest) -> PublishReport:
        """Between the trainers and the engines."""
        tenant, folder = manifest.adapter, Path(manifest.folder)
        if damage := self._damage.pop(tenant, None):
            damage(folder)
        else:
            self._check_idle(manifest)
            self._ledger.expect(manifest.name, await asyncio.to_thread(self._reference.expect, folder, manifest.canary))
            self._ledger.check_canary(manifest.name, fmean(manifest.canary_logprobs))
        return await self._publish_to_engines(manifest)

    def _check_idle(self, manifest: Manifest) -> None:
        """A tenant that was not trained since its last publish must not have changed."""
        tenant, steps = manifest.adapter, self._steps[manifest.adapter]
        before, fingerprint = self._fingerprints.pop(tenant, (-1, ""))
        if steps % 2 or steps != self._steps_before[tenant]:  # it is being trained, and may have been written before or after
            return
        if steps == before:
            self._ledger.check_unchanged(manifest.name, fingerprint == manifest.fingerprint)
        self._fingerprints[tenant] = steps, manifest.fingerprint

    # -- sampling ----------------------------------------------------------------------------------------------------------------------

    async def _keep_sampling(self, tenant: str) -> None:
        while not self.over.is_set():
            known = self._published[tenant]
            older = known[-2] if len(known) > 1 and self._rng.random() < OLDER else None
            oldest = self._current(tenant) if older is None else older
            async with self._timed("sample", tenant):
                samples = await self._adapters.sample(tenant, PROMPT, GREEDY, n=2, version=older)
                newest = self._current(tenant) if older is None else older
                for sample in samples:
                    self._ledger.check_sample(tenant, sample, oldest=oldest, newest=newest)
            await self._pause(SAMPLE_PAUSE_S)

    def _current(self, tenant: str) -> int:
        return self._adapters.fleet.adapters.catalog.find(tenant).version

    # -- waiting -----------------------------------------------------------------------------------------------------------------------

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(self._pace * seconds):
                await self.over.wait()
        except TimeoutError:
            return

    @asynccontextmanager
    async def _timed(self, operation: str, who: str) -> AsyncIterator[None]:
        """Time the body; a hang or a failure goes to the ledger, a `PublishError` to the caller."""
        start, limit = time.monotonic(), asyncio.timeout(LIMIT_S)
        try:
            async with limit:
                yield
        except PublishError:
            raise
        except OffbeatError as exc:
            self._ledger.failures.append(f"{operation} of {who}: {exc}")
        except TimeoutError:
            if not limit.expired():
                raise
            self._ledger.hangs.append(f"{operation} of {who}")
        finally:
            self._ledger.took(operation, time.monotonic() - start)
