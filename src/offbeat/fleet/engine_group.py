"""Starts, watches and stops the engines of a run as worker processes. Torch-free.

Each run draws a key that its engines require with every request. They get it through the pipe to their worker or in their environment; it
appears on no command line and in no file.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from offbeat.aio import gather_all
from offbeat.config.for_processes import EngineConfig
from offbeat.data import wire
from offbeat.data.image_store import images_folder
from offbeat.engine.options import EngineAddress, EngineOptions, EngineStart
from offbeat.errors import EngineError, StorageError, WorkerError
from offbeat.fleet.owner import begin_start
from offbeat.fleet.server_worker import ServerStart
from offbeat.fleet.servers import engine_python, server_command
from offbeat.machine import PROMISED_DEVICES, VISIBLE_DEVICES
from offbeat.phase import waiting_for
from offbeat.workers.deliveries import Deliveries
from offbeat.workers.local import LocalLauncher
from offbeat.workers.worker import Launcher, Nothing, Worker, WorkerSpec, ask, huge_page_environment

_EMBEDDED = "offbeat.engine.worker:EngineWorker"
_SERVER = "offbeat.fleet.server_worker:ServerWorker"
_WATCH_INTERVAL_S = 0.25
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 5.0
_RESTART_STOP_TIMEOUT_S = 0.5
"""Short, because a process that is restarted has already failed."""
_KEY_BYTES = 32
_MARGIN_S = 5.0
"""Added to a worker's deadline, so that it can report why its server missed it."""


@dataclass(frozen=True)
class EngineAddresses:
    """Addresses of a run's engines, and the credentials to call them.

    Attributes:
        urls: URLs by name, such as {"engine 0": "http://127.0.0.1:41873"}.
        key: key that all of them require; empty if they require none.
        owner: identity of the run for engines that it has not started, see `owner`; empty for its own, whose key only it knows.
    """

    urls: dict[str, str]
    key: str = field(repr=False)
    owner: str = ""


class EngineGroup:
    """E engines named "engine 0" to "engine E-1": processes of the run, or servers at `inference.urls` that it only uses.

    Attributes:
        workers: the processes, in order; empty where the run does not own the engines.
        key: key that the engines require: this run's own, or $OFFBEAT_API_KEY for servers by URL; empty for none.
    """

    def __init__(
        self, config: EngineConfig, *, launcher: Launcher | None = None, specs: Sequence[WorkerSpec] = (), publishes: bool = False,
    ) -> None:
        self.workers: list[Worker] = []
        self.key = os.environ.get("OFFBEAT_API_KEY", "") if config.inference.urls else secrets.token_urlsafe(_KEY_BYTES)
        self._config = config
        self._launcher = launcher
        self._specs = specs
        self._serving: Callable[[int, int], EngineStart | ServerStart] | None = None
        self._ports: dict[str, int] = {}
        self._publishes = publishes
        self._deliveries = Deliveries()

    @classmethod
    async def start(cls, launcher: Launcher, config: EngineConfig, *, log_dir: Path, publishes: bool = True) -> "EngineGroup":
        """Start the processes; they serve nothing before `serve`.

        `publishes` says whether weights or adapters will be published to them; engines by URL then have to belong to the run.

        Raises:
            ConfigError: the environment of another make of engine does not exist.
        """
        if config.inference.urls:
            return cls(config, publishes=publishes)
        inside = config.inference.kind.inside
        if not inside:
            engine_python(config)
        reads_much = inside and not config.inference.devices_per_engine and bool(config.model.path)
        specs = [
            WorkerSpec(
                name, _EMBEDDED if inside else _SERVER, log_dir / f"{name.replace(' ', '-')}.log", threads=config.inference.threads,
                num_devices=config.inference.devices_per_engine, env=huge_page_environment() if reads_much else {})
            for name in engine_names(config.inference.num_engines)]
        group = cls(config, launcher=launcher, specs=specs)
        with waiting_for("starting the engines", (spec.name for spec in specs)) as done:

            async def start(spec: WorkerSpec) -> Worker:
                worker = await launcher.start(spec, timeout_s=config.inference.start_timeout_s)
                done(spec.name)
                return worker

            await gather_all(launcher.reserve([spec], timeout_s=config.inference.start_timeout_s) for spec in specs)
            group.workers = await gather_all(start(spec) for spec in specs)
        return group

    async def serve(self, *, model: str, tokenizer: str, version: int) -> EngineAddresses:
        """Load `model` on every engine and return their addresses."""
        if not self.workers:
            given = self._config.inference.urls
            owner = begin_start(self._config.run_dir, exclusive=not self._config.model.lora.rank) if self._publishes else ""
            return EngineAddresses(dict(zip(engine_names(len(given)), given, strict=True)), self.key, owner)
        self._serving = partial(self._request, model=model, tokenizer=tokenizer, version=version)
        with waiting_for("engines load the model", (worker.name for worker in self.workers)) as done:

            async def serve(index: int) -> str:
                url = await self._serve(index)
                done(self.workers[index].name)
                return url

            urls = await gather_all(serve(index) for index in range(len(self.workers)))
        return EngineAddresses({worker.name: url for worker, url in zip(self.workers, urls, strict=True)}, self.key)

    async def restart(self, name: str) -> str:
        """Replace the engine's process by a new one on the model folder of `serve`, and return its URL.

        An embedded engine keeps its old URL if the port is still free. Only for engines that the run owns.

        Raises:
            EngineError, WorkerError, DeadlineError: it does not start.
        """
        assert self._launcher is not None, "only engines that the run started are restarted"
        index = [worker.name for worker in self.workers].index(name)
        await self.workers[index].stop(timeout_s=_RESTART_STOP_TIMEOUT_S)
        port = self._ports.pop(name, 0)  # the other ranks know this port; used once, as another process may take it
        self.workers[index] = await self._launcher.start(self._specs[index], timeout_s=self._config.inference.start_timeout_s)
        return await self._serve(index, port=port)

    def cpu_s(self, name: str) -> float | None:
        """Return the CPU time of an engine's processes so far, in seconds; None if that is not seen from here."""
        return next((worker.cpu_s for worker in self.workers if worker.name == name), None)

    async def deliver(self, name: str, folder: str, timeout_s: float) -> str:
        """Make a folder present on the engine's machine, if that does not see this one's files, and return its path there.

        Raises:
            EngineError: it could not be sent. DeadlineError: that took too long.
        """
        disk = next((worker.disk for worker in self.workers if worker.name == name), None)
        shared = self._config.weights.dir
        if disk is None or (shared and Path(folder).is_relative_to(Path(shared).resolve())):
            return folder
        try:
            return await self._deliveries.deliver(Path(folder), disk, timeout_s=timeout_s)
        except (StorageError, WorkerError) as exc:
            raise EngineError(f"{name} could not be sent {folder}: {exc}") from exc

    async def end_process(self, name: str) -> None:
        """End the engine's process, so that its memory is free; `restart` replaces it. Only for engines that the run owns."""
        await self.workers[[worker.name for worker in self.workers].index(name)].stop(timeout_s=_RESTART_STOP_TIMEOUT_S)

    async def watch(self, on_death: Callable[[str, str], None]) -> None:
        """Until cancelled, call `on_death(engine, reason)` once for each engine whose process dies."""
        told: set[Worker] = set()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            dead = [worker for worker in self.workers if not worker.alive]
            for worker in dead:
                if worker not in told:
                    on_death(worker.name, "its process died")
            told = set(dead)

    def _request(self, index: int, port: int, *, model: str, tokenizer: str, version: int) -> EngineStart | ServerStart:
        config, host = self._config, self.workers[index].host
        if config.inference.kind.inside:
            options = engine_options(config, model, tokenizer, version, index, api_key=self.key)
            return EngineStart(wire.encode_json(options).decode(), host, port)
        command, env = server_command(
            config, model=model, tokenizer=tokenizer, version=version, seed=engine_seed(config, index), key=self.key)
        return ServerStart(command, env, host, config.inference.start_timeout_s, self.key)

    async def _serve(self, index: int, *, port: int = 0) -> str:
        assert self._serving is not None, "`serve` says what"
        timeout_s = self._config.inference.start_timeout_s + _MARGIN_S
        worker = self.workers[index]
        url = (await ask(worker, "start", self._serving(index, port), EngineAddress, timeout_s=timeout_s)).url
        self._ports[worker.name] = int(url.rpartition(":")[2])
        return url


def engine_names(count: int) -> list[str]:
    """Return the names of `count` engines, in order, such as "engine 0" and "engine 1"."""
    return [f"engine {index}" for index in range(count)]


def engine_seed(config: EngineConfig, index: int) -> int:
    """Return the seed of engine `index`, for requests that have none."""
    return config.run.seed * 1000 + index


def engine_options(config: EngineConfig, model: str, tokenizer: str, version: int, index: int, *, api_key: str = "") -> EngineOptions:
    """Return the options that engine `index` of a run starts with."""
    inference = config.inference
    return EngineOptions(
        model=model, tokenizer=tokenizer, dtype=config.model.number_format,
        quantization="none" if inference.quantization == "none" else "int8",  # the only form of this kind
        forward=inference.forward, max_running=inference.max_running,
        max_queued=inference.max_queued, max_context=inference.max_context, max_cache_bytes=inference.max_cache_bytes,
        prefix_caching=inference.prefix_caching, batch_invariant=inference.batch_invariant, num_engines=inference.num_engines,
        max_adapters=inference.max_adapters, max_adapter_rank=inference.max_adapter_rank,
        max_prefill_per_round=inference.max_prefill_per_round,
        stall_timeout_s=inference.stall_timeout_s, seed=engine_seed(config, index), api_key=api_key, version=version,
        images=str(images_folder(config.run_dir)))


@asynccontextmanager
async def serve_one(options: EngineOptions, *, host: str, port: int, threads: int, device: int | None) -> AsyncIterator[tuple[str, Worker]]:
    """Run one engine outside of any run, in a process that writes to this one's terminal; yields its URL and its worker."""
    env = huge_page_environment() if device is None else {VISIBLE_DEVICES: str(device), PROMISED_DEVICES: "1"}
    spec = WorkerSpec("engine", _EMBEDDED, log=None, threads=threads, env=env)
    async with LocalLauncher(stop_timeout_s=_STOP_TIMEOUT_S) as launcher:
        worker = await launcher.start(spec, timeout_s=_START_TIMEOUT_S)
        start = EngineStart(wire.encode_json(options).decode(), host, port)
        yield (await ask(worker, "start", start, EngineAddress, timeout_s=_START_TIMEOUT_S)).url, worker


async def raise_death(worker: Worker) -> None:
    """Raise a dead worker's error, with its signal or exit code."""
    await ask(worker, "ping", Nothing(), Nothing, timeout_s=_STOP_TIMEOUT_S)
