"""The `ray` launcher: workers are Ray actors, on one machine or many. The only module that imports Ray; an optional extra.

An actor hosts the same service as a local child and answers with the same bytes. Errors cross as data, so they read the same under both.
"""

import asyncio
import logging
import os
import subprocess
import threading
from typing import Any, Self

from offbeat.aio import deadline
from offbeat.cluster.group import Worker, WorkerSpec
from offbeat.cluster.ray_reaper import start_reaper
from offbeat.config.root import Config
from offbeat.errors import ConfigError, DeadlineError, MissingExtraError, WorkerError
from offbeat.process import Failure, answer, log_tail, redirect_output, resolve_handler, thread_stacks

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
try:
    import ray
    from ray.exceptions import RayActorError, RayError
except ImportError as exc:
    raise MissingExtraError("cluster.launcher = \"ray\" needs Ray, which is not installed; run pip install 'offbeat[ray]'") from exc

_STACK_TIMEOUT_S = 2.0


class _Host:
    """The actor: one service, one call at a time; `stack` is answered beside a running call."""

    def __init__(self, target: str, log: str) -> None:
        if log:
            redirect_output(log)
        self._handler = resolve_handler(target)

    def node_address(self) -> str:
        return ray.util.get_node_ip_address()

    def call(self, method: str, payload: bytes) -> tuple[bool, bytes]:
        result = answer(self._handler, method, payload)
        return (False, result.pack()) if isinstance(result, Failure) else (True, result)

    @ray.method(concurrency_group="control")
    def live(self) -> None:
        threading.Event().wait()  # for as long as the process lives; its caller is told of the end at once

    @ray.method(concurrency_group="control")
    def stack(self) -> str:
        return thread_stacks()


class RayWorker:
    """One actor, seen from the controller."""

    def __init__(self, spec: WorkerSpec, actor: Any) -> None:
        self.name = spec.name
        self.host = "127.0.0.1"
        self._spec = spec
        self._actor = actor
        self._dead = False
        self._life = asyncio.create_task(self._watch(), name=f"watch {spec.name}")

    @property
    def alive(self) -> bool:
        return not self._dead

    async def call(self, method: str, payload: bytes = b"", *, timeout_s: float) -> bytes:
        """See `Worker.call`."""
        try:
            async with deadline(f"{method} on {self.name}", timeout_s):
                ok, result = await self._actor.call.remote(method, payload)
        except RayActorError as exc:
            raise self._death(exc) from exc
        except DeadlineError as exc:
            exc.add_note(await self._stack())
            raise
        if not ok:
            raise Failure.unpack(result).to_exception(self.name)
        return result

    async def wait_ready(self, timeout_s: float, *, on_many_machines: bool) -> None:
        """Wait until the service is constructed; on a cluster, its servers then listen on its machine's address."""
        try:
            async with deadline(f"{self.name} to start", timeout_s):
                address = await self._actor.node_address.remote()
            if on_many_machines:
                self.host = address
        except RayActorError as exc:
            raise self._death(exc) from exc
        except BaseException:
            await self.stop(timeout_s=0)
            raise

    async def stop(self, *, timeout_s: float) -> None:
        """End the actor."""
        del timeout_s
        self._dead = True
        self._life.cancel()
        ray.kill(self._actor)

    async def _watch(self) -> None:
        try:
            await self._actor.live.remote()
        except RayError:
            self._dead = True

    async def _stack(self) -> str:
        try:
            async with asyncio.timeout(_STACK_TIMEOUT_S):
                return f"stack of {self.name}:\n{await self._actor.stack.remote()}"
        except (TimeoutError, RayError):
            return f"{self.name} does not answer: stopped, dead, or holding the interpreter lock"

    def _death(self, cause: Exception) -> WorkerError:
        self._dead = True
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        error = WorkerError(f"{self.name} died: {lines[-1] if lines else type(cause).__name__}")
        if tail := log_tail(self._spec.log):
            error.add_note(f"last lines of {self._spec.log}:\n{tail}")
        return error


class RayLauncher:
    """Starts actors. Joins the cluster at `address`, or starts one here that ends with this process."""

    def __init__(self, *, address: str, num_cpus: int) -> None:
        """`num_cpus` is what all workers ask for; a Ray started here is told that it has as many, so that none waits for a core."""
        self._address = address
        self._num_cpus = num_cpus
        self._workers: list[RayWorker] = []
        self._reaper: subprocess.Popen[bytes] | None = None

    @classmethod
    def from_config(cls, config: Config) -> Self:
        num_cpus = config.train.num_ranks * config.train.threads + config.inference.num_engines * config.inference.threads
        return cls(address=config.cluster.ray_address, num_cpus=num_cpus)

    async def __aenter__(self) -> Self:
        here = {} if self._address else {"num_cpus": max(self._num_cpus, os.cpu_count() or 1), "include_dashboard": False}
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        logging.getLogger("ray").setLevel(logging.ERROR)  # its remarks would stand between ours on the terminal
        try:
            await asyncio.to_thread(ray.init, address=self._address or "local", **quiet, **here)
        except ConnectionError as exc:
            raise ConfigError(
                f"no Ray cluster answers at cluster.ray_address = {self._address!r}; start one with `ray start --head`, or leave it empty"
            ) from exc
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(worker.stop(timeout_s=0) for worker in self._workers if worker.alive))
        await asyncio.to_thread(ray.shutdown)
        if self._reaper is not None:
            await asyncio.to_thread(self._reaper.communicate)

    async def start(self, spec: WorkerSpec, *, timeout_s: float) -> Worker:
        """See `Launcher.start`."""
        make_remote: Any = ray.remote(concurrency_groups={"control": 2})  # pyright: ignore[reportCallIssue] (stubs lack the argument)
        host = make_remote(_Host)
        actor = host.options(
            num_cpus=spec.threads, num_gpus=spec.num_devices, max_restarts=0, runtime_env={"env_vars": spec.environment},
        ).remote(spec.target, str(spec.log or ""))
        worker = RayWorker(spec, actor)
        self._workers.append(worker)
        await worker.wait_ready(timeout_s, on_many_machines=bool(self._address))
        if self._reaper is None and not self._address:
            self._reaper = start_reaper()
        return worker
