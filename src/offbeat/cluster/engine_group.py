"""The engines of a run: started, watched and stopped as workers. Torch-free."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from offbeat.aio import gather_all
from offbeat.cluster.group import Launcher, Nothing, Worker, WorkerSpec, ask
from offbeat.cluster.local import LocalLauncher
from offbeat.cluster.messages import EngineAddress, EngineStart
from offbeat.config.root import Config
from offbeat.data import wire
from offbeat.errors import EngineError
from offbeat.inference.embedded.options import EngineOptions

_TARGET = "offbeat.cluster.engine_worker:EngineWorker"
_WATCH_INTERVAL_S = 0.25
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 5.0


class EngineGroup:
    """E engine processes."""

    def __init__(self, workers: Sequence[Worker], config: Config) -> None:
        self.workers = workers
        self._config = config

    @classmethod
    async def start(cls, launcher: Launcher, config: Config, *, log_dir: Path) -> "EngineGroup":
        """Start the processes; they serve nothing before `serve`."""
        names = [f"engine {index}" for index in range(config.inference.num_engines)]
        specs = [
            WorkerSpec(
                name, _TARGET, log_dir / f"{name.replace(' ', '-')}.log",
                threads=config.inference.threads, num_devices=config.cluster.devices_per_worker)
            for name in names]
        return cls(await gather_all(launcher.start(spec, timeout_s=config.inference.start_timeout_s) for spec in specs), config)

    async def serve(self, *, model: str, tokenizer: str, version: int) -> dict[str, str]:
        """Load `model` on every engine; URLs by engine name."""
        addresses = await gather_all(
            ask(worker, "start", self._start(worker, engine_options(self._config, model, tokenizer, version, index)), EngineAddress,
                timeout_s=self._config.inference.start_timeout_s)
            for index, worker in enumerate(self.workers))
        return {worker.name: address.url for worker, address in zip(self.workers, addresses, strict=True)}

    def _start(self, worker: Worker, options: EngineOptions) -> EngineStart:
        return EngineStart(wire.encode_json(options).decode(), worker.host)

    async def watch(self, on_death: Callable[[str, str], None]) -> None:
        """Until cancelled, tell of each engine that dies.

        Raises:
            EngineError: fewer than `inference.min_engines` are left.
        """
        living = {worker.name: worker for worker in self.workers}
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            for name in [name for name, worker in living.items() if not worker.alive]:
                del living[name]
                on_death(name, "its process died")
            if len(living) < self._config.inference.min_engines:
                raise EngineError(
                    f"{len(living)} engines are left, fewer than inference.min_engines = {self._config.inference.min_engines}; "
                    "their logs are in the run's folder logs")


def engine_options(config: Config, model: str, tokenizer: str, version: int, index: int) -> EngineOptions:
    """What engine `index` of a run is started with."""
    inference = config.inference
    return EngineOptions(
        model=model, tokenizer=tokenizer, dtype=config.model.dtype, forward=inference.forward, max_running=inference.max_running,
        max_queued=inference.max_queued, max_context=inference.max_context, seed=config.run.seed * 1000 + index, version=version)


@asynccontextmanager
async def serve_one(options: EngineOptions, *, host: str, port: int, threads: int, device: int | None) -> AsyncIterator[tuple[str, Worker]]:
    """One engine outside of any run, in a process that writes to this one's terminal; gives its URL and its worker."""
    env = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
    spec = WorkerSpec("engine", _TARGET, log=None, threads=threads, env=env)
    async with LocalLauncher(stop_timeout_s=_STOP_TIMEOUT_S) as launcher:
        worker = await launcher.start(spec, timeout_s=_START_TIMEOUT_S)
        start = EngineStart(wire.encode_json(options).decode(), host, port)
        yield (await ask(worker, "start", start, EngineAddress, timeout_s=_START_TIMEOUT_S)).url, worker


async def raise_death(worker: Worker) -> None:
    """Raise the error that tells how a dead worker died."""
    await ask(worker, "ping", Nothing(), Nothing, timeout_s=_STOP_TIMEOUT_S)
