"""The `ray` launcher: Ray, an extra that only this module and `ray_errors` import, places the workers, on one machine or many.

An actor is the parent of one child process, the same as under the `local` launcher, so workers live, fail and die alike under both: an
actor still answers when its child is stopped or dead. Errors cross as data.
"""

import asyncio
import logging
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil

from offbeat.aio import SideThread, deadline
from offbeat.config.for_processes import LauncherConfig
from offbeat.disk import discard
from offbeat.errors import ConfigError, DeadlineError, DeathError, MissingExtraError, OffbeatError
from offbeat.process.child import Child, ChildSpec
from offbeat.process.frames import CallFailure, Payload
from offbeat.workers.disks import DiskService, FarDisk, open_scratch
from offbeat.workers.ray_reaper import Reaper
from offbeat.workers.worker import Worker, WorkerSpec

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
try:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from offbeat.workers.ray_errors import last_line, translated
except ImportError as exc:
    raise MissingExtraError("cluster.launcher = \"ray\" needs Ray, which is not installed; run pip install 'offbeat[ray]'") from exc

_SERVERS = ("raylet", "gcs_server")
_PLACE_LOOK_S = 0.5
_LOG_INTERVAL_S = 1.0
_LOG_CHUNK_BYTES = 1 << 20
_NODE_DIGITS = 12
_MARGIN_S = 3.0
"""Added to an actor's own deadline, so that it can report why it was missed."""


class _Host:
    """The actor: starts one child and forwards calls to it."""

    _child: Child
    _own_log: Path | None = None
    _scratch: Path | None = None
    _disk: DiskService | None = None

    async def start(self, spec: ChildSpec, beside: str, scratch: tuple[str, str], umask: int, timeout_s: float) -> tuple[bool, bytes]:
        """Start the child; returns the folder on this machine's own disk, if there is one.

        Args:
            beside: a file that the controller has put beside the log; where it is not seen, files go to this machine's own disk.
            scratch: the parent folder of these files, "" for the one of temporary files, and the name that this launcher's workers on
                this machine share.
        """
        os.umask(umask)
        try:
            if beside and not Path(beside).exists():
                assert spec.log is not None, "a file is beside the log only where there is one"
                self._own_log = Path(tempfile.mkdtemp(prefix="offbeat-")) / spec.log.name
                self._scratch = open_scratch(Path(scratch[0] or tempfile.gettempdir()), f"{scratch[1]}-{_node()}")
                self._disk = DiskService(self._scratch, durable=False)
            self._child = await Child.start(replace(spec, log=self._own_log or spec.log), timeout_s=timeout_s)
        except OffbeatError as exc:
            return False, CallFailure.of(exc).pack()
        return True, str(self._scratch or "").encode()

    async def ask_disk(self, method: str, payload: bytes, timeout_s: float) -> tuple[bool, bytes]:  # noqa: ARG002 (the caller waits)
        """Call a method of the `DiskService` of this machine."""
        assert self._disk is not None, "only a disk that the controller cannot see is asked"
        try:
            return True, await asyncio.to_thread(self._disk.handle, method, payload)
        except OffbeatError as exc:
            return False, CallFailure.of(exc).pack()

    def read_log(self, offset: int) -> bytes:
        """Return the bytes of this machine's own log from `offset` on, at most a chunk."""
        assert self._own_log is not None, "only a log that the controller cannot see is asked for"
        with self._own_log.open("rb") as file:
            file.seek(offset)
            return file.read(_LOG_CHUNK_BYTES)

    def whereabouts(self) -> tuple[str, int, str]:
        return ray.util.get_node_ip_address(), os.getpid(), _node()

    async def call(self, method: str, payload: bytes, patience_s: float | None, timeout_s: float) -> tuple[bool, bytes]:
        try:
            return True, await self._child.call(method, payload, timeout_s=timeout_s, patience_s=patience_s)
        except OffbeatError as exc:
            return False, CallFailure.of(exc).pack()

    async def stack(self) -> str:
        return await self._child.stack()

    async def ended(self) -> None:
        await self._child.ended()

    async def stop(self, timeout_s: float) -> None:
        await self._child.stop(timeout_s=timeout_s)

    def tidy(self) -> None:
        """Remove this machine's own log, which has been copied."""
        if self._own_log is not None:
            discard(self._own_log.parent)

    def clear(self) -> None:
        """Remove the files of this launcher's workers from this machine's own disk."""
        if self._scratch is not None:
            discard(self._scratch)


class RayWorker:
    """The controller's view of one actor and its child, a `Worker`."""

    def __init__(self, spec: WorkerSpec, actor: Any) -> None:
        self.name = spec.name
        self.host = "127.0.0.1"
        self.disk: FarDisk | None = None
        self._log = spec.log
        self._log_bytes = 0
        self._actor = actor
        self._dead = False
        self._life: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, spec: WorkerSpec, *, timeout_s: float, reaper: Reaper | None, place: PlacementGroupSchedulingStrategy | None, beside: str,
        scratch: tuple[str, str],
    ) -> Self:
        """Start a worker; see `Launcher.start`. Without a `reaper`, Ray is a cluster: servers listen on their machine's address.

        Args:
            beside: a file beside its log, which it sees if it shares this machine's disk; "" if it does.
            scratch: where its files go otherwise; see `_Host.start`.
        """
        with translated(spec.name, "to start"):
            actor = ray.remote(_Host).options(
                num_cpus=spec.threads, num_gpus=spec.num_devices, max_restarts=0, scheduling_strategy=place).remote()
        worker = cls(spec, actor)
        try:
            with translated(spec.name, "before it began"):  # as when its machine has just died, and Ray has not found it other room yet
                async with deadline(f"Ray to place {spec.name}", timeout_s):
                    address, pid, node = await actor.whereabouts.remote()
            if reaper:
                reaper.add([pid])
            else:
                worker.host = address
            child = ChildSpec(spec.name, spec.target, spec.environment, spec.log.absolute() if spec.log else None)
            root = await worker._ask("start", child, beside, scratch, _umask(), timeout_s=timeout_s, doing="to start")
            worker.disk = FarDisk(f"node {node}", root.decode(), worker._ask_disk) if root else None
        except BaseException:
            worker.kill()
            raise
        worker._life = asyncio.create_task(worker._watch(), name=f"watch {spec.name}")
        if worker.disk is not None:
            assert spec.log is not None, "only a log can be elsewhere"
            spec.log.touch()  # even if nothing is ever written into it, as on a shared disk
            worker._following = asyncio.create_task(worker._follow_log(), name=f"follow the log of {spec.name}")
        return worker

    @property
    def alive(self) -> bool:
        return not self._dead

    @property
    def cpu_s(self) -> None:
        return None

    async def call(self, method: str, payload: Payload = b"", *, timeout_s: float, patience_s: float | None = None) -> bytes:
        whole = payload if isinstance(payload, bytes) else b"".join(payload)
        return await self._ask("call", method, whole, patience_s, timeout_s=timeout_s, doing=f"in {method}")

    async def _ask_disk(self, method: str, payload: bytes, timeout_s: float) -> bytes:
        return await self._ask("ask_disk", method, payload, timeout_s=timeout_s, doing=f"in {method} on its disk")

    async def stack(self) -> str:
        try:
            async with asyncio.timeout(_MARGIN_S):
                return await self._actor.stack.remote()
        except (TimeoutError, RayError) as exc:
            return f"{self.name} does not answer, nor does its Ray actor: {last_line(exc)}"

    async def stop(self, *, timeout_s: float, clears: bool = False) -> None:
        """See `Worker.stop`; `clears` also removes the files of this launcher's workers from that machine's disk."""
        with suppress(OSError, RayError):  # a missed timeout is an OSError, and so is a full disk, which must not keep it alive
            async with asyncio.timeout(timeout_s + _MARGIN_S):
                await self._actor.stop.remote(timeout_s)
                await self.finish_log()
                if clears:
                    await self.clear_disk()
        self.kill()

    def kill(self) -> None:
        """End the actor and its child at once."""
        self._dead = True
        for task in (self._life, self._following):
            if task is not None:
                task.cancel()
        with suppress(RayError, RuntimeError):  # the cluster has gone, and it with it
            ray.kill(self._actor)

    async def _ask(self, function: str, *arguments: Any, timeout_s: float, doing: str) -> bytes:
        try:
            with translated(self.name, doing):
                async with deadline(f"the Ray actor of {self.name} {doing}", timeout_s + _MARGIN_S):
                    ok, result = await getattr(self._actor, function).remote(*arguments, timeout_s)
            if not ok:
                raise CallFailure.unpack(result).to_exception(self.name, doing)
        except DeathError:
            self._dead = True
            raise
        return result

    async def _watch(self) -> None:
        with suppress(RayError):
            await self._actor.ended.remote()
        self._dead = True

    async def _follow_log(self) -> None:
        """Copy the log from the worker's machine as it grows, until the actor is gone; the rest is lost with it."""
        with suppress(OSError, RayError):  # `finish_log` tries again if the disk was full
            while True:
                await asyncio.sleep(_LOG_INTERVAL_S)
                await self._copy_log()

    async def finish_log(self) -> None:
        """Copy the rest of a log that is on another machine, and remove it there."""
        if self._following is not None:
            self._following.cancel()  # only one may copy
            with suppress(OSError, RayError):  # a missed timeout, or a full disk
                async with asyncio.timeout(_MARGIN_S):
                    await self._copy_log()
                    await self._actor.tidy.remote()

    async def clear_disk(self) -> None:
        """Remove the files of this launcher's workers from this worker's machine, if it does not see the run's files."""
        if self.disk is not None:
            with suppress(OSError, RayError):
                async with asyncio.timeout(_MARGIN_S):
                    await self._actor.clear.remote()

    async def _copy_log(self) -> None:
        assert self._log is not None, "a worker without a log shares the terminal"
        while chunk := await self._actor.read_log.remote(self._log_bytes):
            with self._log.open("ab") as file:
                file.write(chunk)
            self._log_bytes += len(chunk)


class RayLauncher:
    """Starts actors. Joins the cluster at `address`, or starts a local one that ends with this process.

    Room is kept by placement groups: one for each call of `reserve`, whose workers are packed onto as few machines as can hold them.
    """

    def __init__(
        self, *, address: str, num_cpus: int, start_timeout_s: float, stop_timeout_s: float, wants_devices: bool = True,
        scratch_dir: str = "",
    ) -> None:
        """Prepare it; Ray starts on entering it.

        Args:
            num_cpus: number of cores that all workers request; a local Ray is told that it has as many, so none waits.
            wants_devices: whether any worker will request a device; a cluster that has some is refused otherwise.
            scratch_dir: parent of files that travel, on machines that do not see this one's; "" for the folder of temporary files.
        """
        self._scratch = scratch_dir, secrets.token_hex(8)
        self._wants_devices = wants_devices
        self._address = address
        self._num_cpus = num_cpus
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._workers: list[RayWorker] = []
        self._thread = SideThread("ray")
        self._reaper: Reaper | None = None
        self._own: set[psutil.Process] = set()
        self._places: dict[str, PlacementGroupSchedulingStrategy] = {}
        self._beside: dict[Path, Path] = {}

    @classmethod
    def from_config(cls, config: LauncherConfig, *, devices_taken: int = 0) -> Self:  # noqa: ARG003 (Ray deals devices out itself)
        return cls(
            address=config.cluster.ray_address, num_cpus=config.num_cores, start_timeout_s=config.cluster.start_timeout_s,
            stop_timeout_s=config.cluster.stop_timeout_s, wants_devices=config.wants_devices, scratch_dir=config.cluster.scratch_dir)

    async def __aenter__(self) -> Self:
        logging.getLogger("ray").setLevel(logging.ERROR)  # its messages would mix with ours on the terminal
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        if self._address:
            await self._init(address=self._address, **quiet)
            with translated("this run", "to see its devices"):
                count = ray.cluster_resources().get("GPU")
            if count and not self._wants_devices:
                ray.shutdown()
                self._thread.close()
                raise ConfigError(
                    f"the Ray cluster has {count:g} GPUs, and this run would compute on CPUs; give train.devices_per_rank = 1 and"
                    " inference.devices_per_engine")
            return self
        self._reaper = Reaper()
        before = set(_children())
        try:
            num_cpus = max(self._num_cpus, os.cpu_count() or 1)
            with self._reaper.starting():
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
        except (RayError, RuntimeError, ValueError) as exc:
            if isinstance(exc, OffbeatError):
                raise
            at = f"at cluster.ray_address = {self._address!r} does not take this run" if self._address else "cannot be started here"
            raise ConfigError(f"a Ray cluster {at}: {' '.join(str(exc).split()) or type(exc).__name__}") from exc

    async def __aexit__(self, error: object, *_: object) -> None:
        if error:
            await asyncio.gather(*(worker.finish_log() for worker in self._workers), return_exceptions=True)
            await asyncio.gather(*(worker.clear_disk() for worker in self._workers), return_exceptions=True)
            for worker in self._workers:
                worker.kill()
        else:
            stops = (worker.stop(timeout_s=self._stop_timeout_s, clears=True) for worker in self._workers)
            await asyncio.gather(*stops, return_exceptions=True)  # remaining processes are ended below
        for process in self._own:
            with suppress(psutil.NoSuchProcess):
                if process.name() not in _SERVERS:
                    process.kill()  # its monitors have nothing to save, and react to SIGTERM only after a second
        for path in self._beside.values():
            path.unlink(missing_ok=True)
        try:
            with suppress(DeadlineError):  # remaining processes are ended below, or belong to a cluster
                await self._thread.run("Ray to end", ray.shutdown, timeout_s=self._stop_timeout_s)
        finally:
            self._thread.close()
            if self._reaper is not None:
                await asyncio.to_thread(self._reaper.reap)

    async def reserve(self, specs: Sequence[WorkerSpec], *, timeout_s: float) -> None:
        if all(spec.name in self._places for spec in specs):  # they are started anew, and Ray moves their room if its machine is gone
            return
        bundles = [{"CPU": float(spec.threads)} | ({"GPU": float(spec.num_devices)} if spec.num_devices else {}) for spec in specs]
        with translated(_named(specs), "to find it room"):
            group = placement_group(bundles, strategy="PACK" if len(bundles) > 1 else "STRICT_PACK")
            give_up_s = time.monotonic() + timeout_s
            while not await asyncio.to_thread(group.wait, _PLACE_LOOK_S):
                if time.monotonic() > give_up_s:
                    remove_placement_group(group)
                    raise DeadlineError(
                        f"Ray found no room for {_named(specs)} within {timeout_s:g} s: asked for {_listed(bundles)}, all at once, while"
                        f" {_shown_nodes()}; add machines, lower the numbers of processes, devices or threads, or raise"
                        " cluster.start_timeout_s or inference.start_timeout_s")
        for index, spec in enumerate(specs):
            self._places[spec.name] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)

    async def start(self, spec: WorkerSpec, *, timeout_s: float) -> Worker:
        worker = await RayWorker.start(
            spec, timeout_s=timeout_s, reaper=self._reaper, place=self._places.get(spec.name), beside=self._mark(spec),
            scratch=self._scratch)
        self._workers.append(worker)
        return worker

    def _mark(self, spec: WorkerSpec) -> str:
        """Put a file such as ".seen-4f1c09a2b37de856" beside a log that may be elsewhere, once per folder; return its path."""
        if self._reaper is not None or spec.log is None:
            return ""
        folder = spec.log.parent.absolute()
        if folder not in self._beside:
            self._beside[folder] = folder / f".seen-{secrets.token_hex(8)}"
            self._beside[folder].touch()
        return str(self._beside[folder])


def _named(specs: Sequence[WorkerSpec]) -> str:
    return specs[0].name if len(specs) == 1 else f"{specs[0].name} to {specs[-1].name}"


def _listed(bundles: Sequence[Mapping[str, float]]) -> str:
    """Return the bundles asked for as text, such as "2 times 4 CPU and 1 GPU"."""
    counts = Counter(_resources(bundle) for bundle in bundles)
    return ", ".join(f"{count} times {what}" if count > 1 else what for what, count in counts.items())


def _resources(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{bundle[name]:g} {name}" for name in ("CPU", "GPU") if bundle.get(name))


def _shown_nodes() -> str:
    """Describe the machines of the cluster, and its free resources."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    counts = Counter(_resources(node) or "nothing" for node in nodes)
    each = ", ".join(f"{count} of {what}" for what, count in counts.items())
    free = _resources(ray.available_resources()) or "nothing"
    return f"the cluster has {len(nodes)} machine{'' if len(nodes) == 1 else 's'} ({each}), with {free} free"


def _node() -> str:
    """Return a short name of the Ray node on which this process runs."""
    return ray.get_runtime_context().get_node_id()[:_NODE_DIGITS]


def _umask() -> int:
    """Return this process's umask; workers elsewhere use it, so that their files are as private."""
    os.umask(mask := os.umask(0o077))
    return mask


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)
