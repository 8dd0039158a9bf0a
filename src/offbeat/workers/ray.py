"""The `ray` launcher: Ray places the workers, on one machine or many. The only module that imports Ray, which is an optional extra.

An actor is the parent of one child process, the same as under the `local` launcher, so workers live, fail and die alike under both: an
actor still answers when its child is stopped or dead. Errors cross as data.
"""

import asyncio
import logging
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil

from offbeat.aio import SideThread, deadline
from offbeat.config.root import Config
from offbeat.errors import ConfigError, DeadlineError, DeathError, MissingExtraError, OffbeatError
from offbeat.process.child import Child, ChildSpec
from offbeat.process.frames import Failure
from offbeat.workers.ray_reaper import Reaper
from offbeat.workers.worker import Worker, WorkerSpec

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
try:
    import ray
    from ray.exceptions import RayActorError, RayError
except ImportError as exc:
    raise MissingExtraError("cluster.launcher = \"ray\" needs Ray, which is not installed; run pip install 'offbeat[ray]'") from exc

_SERVERS = ("raylet", "gcs_server")
_MARGIN_S = 3.0
"""Added to an actor's own deadline, so that it can report why it was missed."""


class _Host:
    """The actor: starts one child and forwards calls to it."""

    _child: Child

    async def start(self, name: str, target: str, env: dict[str, str], log: str, umask: int, timeout_s: float) -> tuple[bool, bytes]:
        os.umask(umask)
        try:
            self._child = await Child.start(ChildSpec(name, target, env, Path(log) if log else None), timeout_s=timeout_s)
        except OffbeatError as exc:
            return False, Failure.of(exc).pack()
        return True, b""

    def whereabouts(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), os.getpid()

    async def call(self, method: str, payload: bytes, patience_s: float | None, timeout_s: float) -> tuple[bool, bytes]:
        try:
            return True, await self._child.call(method, payload, timeout_s=timeout_s, patience_s=patience_s)
        except OffbeatError as exc:
            return False, Failure.of(exc).pack()

    async def stack(self) -> str:
        return await self._child.stack()

    async def ended(self) -> None:
        await self._child.ended()

    async def stop(self, timeout_s: float) -> None:
        await self._child.stop(timeout_s=timeout_s)


class RayWorker:
    """The controller's view of one actor and its child."""

    def __init__(self, spec: WorkerSpec, actor: Any) -> None:
        self.name = spec.name
        self.host = "127.0.0.1"
        self._actor = actor
        self._dead = False
        self._life: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, spec: WorkerSpec, *, timeout_s: float, reaper: Reaper | None) -> Self:
        """Start a worker; see `Launcher.start`. Without a `reaper`, Ray is a cluster: servers listen on their machine's address."""
        actor = ray.remote(_Host).options(num_cpus=spec.threads, num_gpus=spec.num_devices, max_restarts=0).remote()
        worker = cls(spec, actor)
        try:
            async with deadline(f"Ray to place {spec.name}", timeout_s):
                address, pid = await actor.whereabouts.remote()
            if reaper:
                reaper.add([pid])
            else:
                worker.host = address
            await worker._ask(
                "start", spec.name, spec.target, spec.environment, str(spec.log or ""), _umask(), timeout_s=timeout_s, doing="to start")
        except BaseException:
            worker.kill()
            raise
        worker._life = asyncio.create_task(worker._watch(), name=f"watch {spec.name}")
        return worker

    @property
    def alive(self) -> bool:
        return not self._dead

    async def call(self, method: str, payload: bytes = b"", *, timeout_s: float, patience_s: float | None = None) -> bytes:
        """See `Worker.call`."""
        return await self._ask("call", method, payload, patience_s, timeout_s=timeout_s, doing=f"in {method}")

    async def stack(self) -> str:
        """See `Worker.stack`."""
        try:
            async with asyncio.timeout(_MARGIN_S):
                return await self._actor.stack.remote()
        except (TimeoutError, RayError) as exc:
            return f"{self.name} does not answer, nor does its Ray actor: {_last_line(exc)}"

    async def stop(self, *, timeout_s: float) -> None:
        """See `Worker.stop`."""
        with suppress(TimeoutError, RayError):
            async with asyncio.timeout(timeout_s + _MARGIN_S):
                await self._actor.stop.remote(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the actor and its child at once."""
        self._dead = True
        if self._life is not None:
            self._life.cancel()
        ray.kill(self._actor)

    async def _ask(self, function: str, *arguments: Any, timeout_s: float, doing: str) -> bytes:
        try:
            async with deadline(f"the Ray actor of {self.name} {doing}", timeout_s + _MARGIN_S):
                ok, result = await getattr(self._actor, function).remote(*arguments, timeout_s)
        except RayActorError as exc:
            self._dead = True
            raise DeathError(f"{self.name} died with its Ray actor {doing}: {_last_line(exc)}") from exc
        if not ok:
            error = Failure.unpack(result).to_exception(self.name, doing)
            self._dead = self._dead or isinstance(error, DeathError)
            raise error
        return result

    async def _watch(self) -> None:
        with suppress(RayError):
            await self._actor.ended.remote()
        self._dead = True


class RayLauncher:
    """Starts actors. Joins the cluster at `address`, or starts a local one that ends with this process."""

    def __init__(self, *, address: str, num_cpus: int, start_timeout_s: float, stop_timeout_s: float) -> None:
        """`num_cpus` is the number of cores that all workers request; a local Ray is told that it has as many, so none waits."""
        self._address = address
        self._num_cpus = num_cpus
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._workers: list[RayWorker] = []
        self._thread = SideThread("ray")
        self._reaper: Reaper | None = None
        self._own: set[psutil.Process] = set()

    @classmethod
    def from_config(cls, config: Config, *, devices_taken: int = 0) -> Self:  # noqa: ARG003 (Ray deals devices out itself)
        computing = config.inference.num_engines + config.rollout.reward_workers  # a reward may be a model that computes as engines do
        num_cpus = config.train.num_ranks * config.train.threads + computing * (config.inference.threads or 1)
        return cls(
            address=config.cluster.ray_address, num_cpus=num_cpus, start_timeout_s=config.cluster.start_timeout_s,
            stop_timeout_s=config.cluster.stop_timeout_s)

    async def __aenter__(self) -> Self:
        logging.getLogger("ray").setLevel(logging.ERROR)  # its messages would mix with ours on the terminal
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        if self._address:
            await self._init(address=self._address, **quiet)
            return self
        self._reaper = Reaper()
        before = set(_children())
        try:
            num_cpus = max(self._num_cpus, os.cpu_count() or 1)
            await self._init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
        except BaseException:
            self._reaper.add(process.pid for process in set(_children()) - before)
            self._reaper.reap()
            self._thread.close()
            raise
        self._own = set(_children()) - before
        self._reaper.add(process.pid for process in self._own)
        return self

    async def _init(self, **options: Any) -> None:
        try:
            await self._thread.run("Ray to start", partial(ray.init, **options), timeout_s=self._start_timeout_s)
        except ConnectionError as exc:
            raise ConfigError(
                f"no Ray cluster answers at cluster.ray_address = {self._address!r}; start one with `ray start --head`, or leave it empty"
            ) from exc

    async def __aexit__(self, error: object, *_: object) -> None:
        if error:
            for worker in self._workers:
                worker.kill()
        else:
            await asyncio.gather(*(worker.stop(timeout_s=self._stop_timeout_s) for worker in self._workers))
        for process in self._own:
            with suppress(psutil.NoSuchProcess):
                if process.name() not in _SERVERS:
                    process.kill()  # its monitors have nothing to save, and react to SIGTERM only after a second
        try:
            with suppress(DeadlineError):  # whatever is left then is ended below, or belongs to a cluster
                await self._thread.run("Ray to end", ray.shutdown, timeout_s=self._stop_timeout_s)
        finally:
            self._thread.close()
            if self._reaper is not None:
                await asyncio.to_thread(self._reaper.reap)

    async def start(self, spec: WorkerSpec, *, timeout_s: float) -> Worker:
        """See `Launcher.start`."""
        worker = await RayWorker.start(spec, timeout_s=timeout_s, reaper=self._reaper)
        self._workers.append(worker)
        return worker


def _umask() -> int:
    """Return this process's umask; workers elsewhere use it, so that they keep private what this process keeps private."""
    os.umask(mask := os.umask(0o077))
    return mask


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _last_line(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[-1] if lines else type(exc).__name__
