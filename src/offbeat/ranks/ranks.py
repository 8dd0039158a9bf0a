"""The train ranks behind one interface for both modes: `WorkerRanks` here, `spmd.ranks` where each rank runs the loop. Torch-free.

A call goes to all ranks. Calls run one after another, in the same order on every rank. When a worker has died, or is out of step with the
others, every call fails until `restart`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from offbeat.aio import gather_all
from offbeat.algorithms.adam import AdamParams
from offbeat.config.for_processes import RankConfig
from offbeat.data.batch import Batch
from offbeat.errors import ConfigError, DeadlineError, RunError, WorkerError
from offbeat.phase import waiting_for
from offbeat.ranks.folder_transfer import FolderTransfer
from offbeat.ranks.sharding import Sharder
from offbeat.trainer.messages import BuildRequest, JoinRequest, Policy, ScoredShare, StoreAddress, Trainee, TrainStep
from offbeat.workers.worker import FAILED_STOP_S, Launcher, Nothing, Worker, WorkerSpec, ask, ask_all

T = TypeVar("T")


class Ranks(Protocol):
    """All train ranks.

    Attributes:
        num_called: number of ranks that this process calls; in SPMD mode each process calls only its own rank.
        alive: whether calls can succeed.
        host: rank 0's machine, as engines reach it.
        spreads_ahead: whether the shares of a step may be asked for while the one before trains.
    """

    @property
    def spreads_ahead(self) -> bool: ...

    @property
    def num_called(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    @property
    def host(self) -> str: ...

    async def call(self, method: str, requests: Sequence[Any], reply: type[T], *, timeout_s: float) -> list[T]:
        """Call a method of every rank's trainer; in SPMD mode every rank calls the same.

        Args:
            method: its name, or "part.name" for a trainer beside the policy's, such as "critic.train_step".
            requests: one for each rank that this process calls.

        Returns:
            The answers of all ranks, in order; in SPMD mode only this rank's, unless the ranks share theirs anyway.
        """
        ...

    async def spread(self, batch: Batch, params: AdamParams, *, num_minibatches: int, seed: int, ahead: bool = False) -> list[TrainStep]:
        """Return the shares of a training step for the ranks that this process calls, from its own batch; see `Sharder.shards`."""
        ...

    async def score(self, method: str, batch: Batch, *, of: Policy, with_entropy: bool, timeout_s: float) -> list[ScoredShare]:
        """Score this process's batch in shares, at least one, which may be empty; see `Sharder.score_shares`."""
        ...

    def observe(self, busy_s: Sequence[float]) -> dict[str, float]:
        """Return balance metrics of the last step, from the seconds that each rank computed; see `Sharder.observe`."""
        ...

    @property
    def sharder(self) -> Sharder:
        """What spreads batches in this process."""
        ...


class WorkerRanks:
    """Ranks that are workers of this process."""

    spreads_ahead = True

    def __init__(
        self, workers: Sequence[Worker], config: RankConfig, *, sharder: Sharder, start_anew: Callable[[], Awaitable[Sequence[Worker]]],
    ) -> None:
        """`sharder` spreads batches over the workers; `start_anew` starts new ranks on the same model."""
        self._workers = workers
        self._config = config
        self.sharder = sharder
        self._start_anew = start_anew
        self._transfer = FolderTransfer(shared=Path(config.weights.dir) if config.weights.dir else None)
        self._turn = asyncio.Lock()
        self._failed = False

    @classmethod
    async def start(
        cls, launcher: Launcher, config: RankConfig, *, model: str, build: BuildRequest | None, log_dir: Path, trains: Trainee = "policy",
        may_load: asyncio.Event | None = None,
    ) -> Self:
        """Start all ranks and wait until they have met and loaded the model; arguments as for `start_ranks`."""
        start = partial(start_ranks, launcher, config, model=model, log_dir=log_dir, trains=trains)
        workers = await start(build=build, may_load=may_load)
        return cls(workers, config, sharder=Sharder.of(config, model=model, num_ranks=len(workers)), start_anew=partial(start, build=None))

    @property
    def num_called(self) -> int:
        return len(self._workers)

    @property
    def host(self) -> str:
        return self._workers[0].host

    @property
    def alive(self) -> bool:
        return not self._failed and all(worker.alive for worker in self._workers)

    @property
    def dead(self) -> tuple[str, ...]:
        """Names of the ranks whose processes have ended."""
        return tuple(worker.name for worker in self._workers if not worker.alive)

    @property
    def workers(self) -> Sequence[Worker]:
        """The processes, in order."""
        return self._workers

    async def restart(self, *, on_gone: Callable[[], None]) -> None:
        """End all ranks at once, hanging ones too, and start new ones. Calls in flight fail.

        `on_gone` is called when the ranks' memory is gone.

        Raises:
            WorkerError, DeathError, DeadlineError: they do not start; may be called again.
        """
        self._failed = True
        await end_ranks(self._workers)
        async with self._turn:
            if self._failed:  # otherwise, another call has done it
                on_gone()
                self._workers = await self._start_anew()
                self._failed = False

    async def call(self, method: str, requests: Sequence[Any], reply: type[T], *, timeout_s: float) -> list[T]:
        # Ranks that miss a peer at a sync point report it themselves, in more detail than the controller's own deadline could.
        patience_s = self._config.dist.sync_timeout_s
        async with self._turn:
            if self._failed:
                raise WorkerError(f"{method} was not begun: the train ranks have failed before, and have to be restarted")
            try:
                async with self._transfer.around(self._workers, method, requests, timeout_s=timeout_s) as placed:
                    answers = await ask_all(self._workers, method, placed, reply, timeout_s=timeout_s + patience_s, patience_s=patience_s)
                return self._transfer.answers(requests, answers)
            except RunError as exc:
                # A single rank is always in step, unless it is still busy with a call that nobody waits for any more.
                self._failed = len(self._workers) > 1 or isinstance(exc, DeadlineError)
                raise

    async def spread(self, batch: Batch, params: AdamParams, *, num_minibatches: int, seed: int, ahead: bool = False) -> list[TrainStep]:
        return await asyncio.to_thread(self.sharder.shards, batch, params, num_minibatches=num_minibatches, seed=seed, ahead=ahead)

    async def score(self, method: str, batch: Batch, *, of: Policy, with_entropy: bool, timeout_s: float) -> list[ScoredShare]:
        shares = await asyncio.to_thread(self.sharder.score_shares, batch, of=of, with_entropy=with_entropy)
        return await self.call(method, shares, ScoredShare, timeout_s=timeout_s)

    def observe(self, busy_s: Sequence[float]) -> dict[str, float]:
        return self.sharder.observe(busy_s)


async def start_ranks(
    launcher: Launcher, config: RankConfig, *, model: str, build: BuildRequest | None, log_dir: Path, trains: Trainee = "policy",
    may_load: asyncio.Event | None = None,
) -> list[Worker]:
    """Start `train.num_ranks` workers and wait until they have met and loaded the model. If that fails, all of them are ended.

    Args:
        model: folder or hub id of the initial weights.
        build: how rank 0 first builds them; None if they exist.
        may_load: set as soon as engines may load the model, too: when it is built, and on shared devices when the ranks have loaded it,
            because an engine's cache takes what they leave free.
    """
    timeout_s = config.cluster.start_timeout_s
    names = [f"rank {rank}" for rank in range(config.train.num_ranks)]
    specs = [
        WorkerSpec(
            name, "offbeat.trainer.worker:TrainWorker", log_dir / f"{name.replace(' ', '-')}.log", threads=config.train.threads,
            num_devices=config.train.devices_per_rank)
        for name in names]
    started: list[Worker] = []

    await launcher.reserve(specs, timeout_s=timeout_s)
    try:
        with waiting_for("starting the train ranks", names) as done:

            async def start(spec: WorkerSpec) -> Worker:
                started.append(worker := await launcher.start(spec, timeout_s=timeout_s))
                done(spec.name)
                return worker

            workers = await gather_all(start(spec) for spec in specs)
        if build is not None:
            if far := [worker.name for worker in workers if worker.disk is not None]:
                raise unseen_model(config.run_dir, far)
            await ask(workers[0], "build_model", build, Nothing, timeout_s=timeout_s)
        if may_load is not None and not config.cluster.devices_are_shared:
            may_load.set()
        store = await ask(workers[0], "host_store", StoreAddress(workers[0].host, 0), StoreAddress, timeout_s=timeout_s)
        text = config.model_dump_json()
        requests = [JoinRequest(rank, len(workers), store, text, model, trains) for rank in range(len(workers))]
        patience_s = config.dist.init_timeout_s
        await ask_all(workers, "join", requests, Nothing, timeout_s=timeout_s + patience_s, patience_s=patience_s)
        await ask_all(
            workers, "load_model", [Nothing()] * len(workers), Nothing, timeout_s=timeout_s, patience_s=config.dist.sync_timeout_s)
        if may_load is not None:
            may_load.set()
    except BaseException:
        await end_ranks(started)
        raise
    return workers


def unseen_model(run_dir: Path, far: Sequence[str]) -> ConfigError:
    """Return the error of a model that is built in the run's folder, which the workers `far` do not see, such as ["engine 0"]."""
    return ConfigError(
        f"[model.tiny] makes a model in the run's folder {run_dir.absolute()}, which {' and '.join(far)} cannot see; give"
        " model.path a hub id, or a folder that is on every machine")


async def end_ranks(workers: Iterable[Worker]) -> None:
    """End ranks that have failed, hanging ones too."""
    await gather_all(worker.stop(timeout_s=FAILED_STOP_S) for worker in workers)
