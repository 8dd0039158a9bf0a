"""All train ranks as one trainer: spreads a batch, calls every rank, and gives one answer. Torch-free."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from offbeat.cluster.group import Launcher, Nothing, Worker, ask_all
from offbeat.cluster.messages import (
    BroadcastRequest,
    BuildRequest,
    ExportRequest,
    Folder,
    Loaded,
    Objective,
    Published,
    PublishRequest,
    Trained,
)
from offbeat.cluster.ranks import start_ranks
from offbeat.cluster.shards import Sharder
from offbeat.config.root import Config
from offbeat.data.batch import TokenBatch
from offbeat.types import Version
from offbeat.weights.protocol import Manifest

T = TypeVar("T")
OnSpan = Callable[[str, str, float, float], None]


class TrainGroup:
    """R ranks that train one model."""

    def __init__(self, workers: Sequence[Worker], config: Config, *, sharder: Sharder, on_span: OnSpan) -> None:
        """`sharder` spreads batches over the workers; `on_span(name, track, start_s, end_s)` hears what each rank did."""
        self._workers = workers
        self._config = config
        self._sharder = sharder
        self._on_span = on_span
        self._step = 0
        self._held: Version | None = None

    @classmethod
    async def start(
        cls, launcher: Launcher, config: Config, *, model: str, build: BuildRequest | None, log_dir: Path, on_span: OnSpan,
    ) -> Self:
        """Start all ranks and wait until they have met and loaded the model."""
        workers = await start_ranks(
            launcher, config, "offbeat.cluster.train_worker:TrainWorker", model=model, build=build, log_dir=log_dir)
        return cls(workers, config, sharder=Sharder.of(config, model=model, num_ranks=len(workers)), on_span=on_span)

    async def set_objective(self, objective: Objective) -> None:
        """Start over with a fresh optimizer for "sft" or "ppo"; the weights stay."""
        self._step, self._held = 0, None
        await self._all("set_objective", objective, Nothing, timeout_s=self._config.train.step_timeout_s)

    async def train_step(self, batch: TokenBatch, *, num_minibatches: int = 1) -> dict[str, float]:
        """One training step; the metrics are over all ranks. A batch without sequences is a step that changes nothing."""
        shards = self._sharder.shards(batch, num_minibatches=num_minibatches, seed=self._config.run.seed + self._step)
        self._step, self._held = self._step + 1, None
        answers = await self._each("train_step", shards, Trained, timeout_s=self._config.train.step_timeout_s)
        for worker, answer in zip(self._workers, answers, strict=True):
            self._on_span("train_step", worker.name, answer.start_s, answer.end_s)
        return answers[0].metrics | self._sharder.observe([answer.busy_s for answer in answers])

    async def publish(self, version: Version, folder: Path, *, canary: tuple[int, ...], num_receivers: int = 0) -> Manifest:
        """See `WriteVersion`."""
        self._held = version
        request = PublishRequest(
            version, str(folder), self._config.model.dtype, canary,
            BroadcastRequest(self._workers[0].host, num_receivers, self._config.weights.stage_timeout_s) if num_receivers else None)
        written, *_ = await self._all("publish", request, Published, timeout_s=self._config.weights.stage_timeout_s)
        return Manifest(version, str(folder), written.fingerprint, canary, written.canary_logprobs, written.broadcast)

    def holds(self, version: Version) -> bool:
        """Whether the ranks have the weights of this version, and no call that changes them is on its way."""
        return self._held == version

    async def save(self, folder: Path) -> None:
        """Write a resumable checkpoint."""
        await self._all("save", Folder(str(folder)), Nothing, timeout_s=self._config.checkpoint.timeout_s)

    async def load(self, folder: Path) -> int:
        """Go on from a checkpoint; gives the training step at which it stands."""
        self._held = None
        loaded, *_ = await self._all("load", Folder(str(folder)), Loaded, timeout_s=self._config.checkpoint.timeout_s)
        self._step = loaded.step
        return loaded.step

    async def export(self, folder: Path, *, tokenizer: str) -> None:
        """Write a Hugging Face folder, with the tokenizer of the folder `tokenizer`."""
        await self._all("export", ExportRequest(str(folder), tokenizer), Nothing, timeout_s=self._config.checkpoint.timeout_s)

    async def _all(self, method: str, request: Any, reply: type[T], *, timeout_s: float) -> list[T]:
        return await self._each(method, [request] * len(self._workers), reply, timeout_s=timeout_s)

    async def _each(self, method: str, requests: Sequence[Any], reply: type[T], *, timeout_s: float) -> list[T]:
        # Ranks that miss one of them at a sync point say so themselves, with more to say than the controller's own deadline has.
        patience_s = self._config.dist.sync_timeout_s
        return await ask_all(self._workers, method, requests, reply, timeout_s=timeout_s + patience_s, patience_s=patience_s)
