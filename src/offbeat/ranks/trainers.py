"""The train ranks as one trainer, for the loop and for the service: each verb spreads its work, calls every rank, and gives one answer.

Works on any `Ranks`. A new verb is a method here and a method of the same name on `offbeat.trainer.trainer.Trainer`. Torch-free.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import numpy as np

from offbeat.algorithms.adam import AdamParams, adam_params
from offbeat.config.for_processes import RankConfig
from offbeat.config.train import OptimizerConfig
from offbeat.data.balance import partition
from offbeat.data.batch import Batch
from offbeat.data.cost import CostModel
from offbeat.data.ranges import gather_ranges
from offbeat.ranks.ranks import Ranks
from offbeat.trainer.messages import (
    AdapterNames,
    BroadcastRequest,
    CanaryScores,
    CanaryTokens,
    ExportRequest,
    Folder,
    LoadedStep,
    NewAdapter,
    OptimStep,
    Policy,
    ScoredShare,
    Scores,
    Stepped,
    TargetScores,
    Trained,
    TrainStep,
    WriteRequest,
    Written,
)
from offbeat.types import Version
from offbeat.weights.protocol import Manifest

T = TypeVar("T")
OnSpan = Callable[[str, str, float, float], None]


class Trainers:
    """R ranks that train one model, or many adapters. In SPMD mode every rank calls the same methods.

    Attributes:
        steps: number of optimizer steps that each adapter has taken, by name; empty where one policy is trained.
        has_trained: whether a training step was asked for, or a checkpoint loaded; before, the weights are the model's in its folder.
        fingerprint: of the policy's weights; "" until they are written after a training step, and in SPMD mode on ranks other than 0.
    """

    def __init__(self, ranks: Ranks, config: RankConfig, *, part: str = "", on_span: OnSpan = lambda *_: None) -> None:
        """`part` is the name of the trained model, "" for the policy.

        `on_span(name, track, start_s, end_s)` is called with each rank's work, for example ("train_step", "rank 0", 12.5, 14.0).
        """
        self.steps: dict[str, int] = {}
        self._ranks = ranks
        self._part = part
        self._config = config
        self._on_span = on_span
        self._optimizer = config.train.optimizer
        self._total_steps = config.run.total_steps
        self._step = 0
        self._held: Version | None = None
        self.fingerprint = ""
        self.has_trained = False
        self._prepared: tuple[Batch, list[TrainStep]] | None = None
        self._spreading = asyncio.Lock()

    async def restart_optimizer(self, optimizer: OptimizerConfig, *, total_steps: int) -> None:
        """Start over with a fresh optimizer, at the beginning of a schedule of `total_steps` training steps; the weights stay."""
        self._step, self._held, self._prepared = 0, None, None
        self._optimizer, self._total_steps = optimizer, total_steps
        await self._all("restart_optimizer", None, NoneType)

    async def train_step(self, batch: Batch, *, num_minibatches: int = 1) -> dict[str, float]:
        """Run one training step on this process's batch; returns metrics over all ranks.

        A step on a batch without sequences changes nothing.

        Raises:
            DataError: a sequence exceeds the token budget.
        """
        prepared, self._prepared = self._prepared, None
        step, self._step = self._step, self._step + 1  # at once: the next step may be prepared while this one is spread
        if prepared is not None and prepared[0] is batch:
            shares = prepared[1]
        else:
            shares = await self._spread(batch, step, num_minibatches=num_minibatches)
        self._held, self.has_trained, self.fingerprint = None, True, ""
        answers = await self._ranks.call(self._name("train_step"), shares, Trained, timeout_s=self._config.train.step_timeout_s)
        for rank, answer in enumerate(answers):
            self._on_span(self._name("train_step"), f"rank {rank}", answer.start_s, answer.end_s)
        # Shares are balanced by the times of the policy's steps.
        seen = {} if self._part else speed(answers) | self._ranks.observe([answer.busy_s for answer in answers])
        return answers[0].metrics | seen

    @property
    def balanced_by(self) -> CostModel:
        """The cost model by which the sequences of the last step were spread over the ranks."""
        return self._ranks.sharder.balanced_by

    def balance_by(self, cost: CostModel | None) -> None:
        """Spread sequences by this cost model from now on, None by the fitted one; see `Sharder.balance_by`."""
        self._ranks.sharder.balance_by(cost)

    async def spread_ahead(self, batch: Batch, *, num_minibatches: int = 1) -> None:
        """Spread the next step's batch where ranks can, for `train_step` to begin at once; raises DataError if a sequence is too long."""
        if self._ranks.spreads_ahead:
            self._prepared = batch, await self._spread(batch, self._step, num_minibatches=num_minibatches, ahead=True)

    async def score(self, batch: Batch, *, of: Policy = "policy", with_entropy: bool = False) -> TargetScores:
        """Score the targets of this process's batch, in its order, under the policy or its reference, without gradients.

        A `train_step` of one update sees the same log-probabilities of the policy.

        Raises:
            ConfigError: the reference is to score, and the configuration has no use for one.
            DataError: a sequence exceeds the token budget.
        """
        answers = await self._ranks.score(
            self._name("score"), batch, of=of, with_entropy=with_entropy, timeout_s=self._config.train.step_timeout_s)
        for rank, answer in enumerate(answers):
            self._on_span(self._name("score"), f"rank {rank}", answer.start_s, answer.end_s)
        return await asyncio.to_thread(_put_together, batch, answers)

    async def write_weights(
        self, version: Version, folder: Path, *, canary: tuple[int, ...], num_receivers: int = 0, base: str = "", is_there: bool = False,
    ) -> Manifest:
        """Write or offer the weights; see `offbeat.weights.channels.VersionWriter`. In SPMD mode only rank 0 gives a fingerprint."""
        self._held = version
        timeout_s = self._config.weights.stage_timeout_s
        broadcast = BroadcastRequest(self._ranks.host, num_receivers, timeout_s) if num_receivers else None
        request = WriteRequest(str(folder), self._config.model.number_format, canary, broadcast=broadcast, base=base, is_there=is_there)
        written = await self._all("write_weights", request, Written, timeout_s=timeout_s)
        self.fingerprint = written.fingerprint
        return Manifest(
            version, str(folder), written.fingerprint, canary, written.canary_logprobs, written.broadcast, num_bytes=written.num_bytes,
            base=written.base)

    def holds(self, version: Version) -> bool:
        """Tell whether the ranks have the weights of this version, and no call that changes them is on its way."""
        return self._held == version

    async def save(self, folder: Path) -> None:
        """Write a resumable checkpoint."""
        # Folders are absolute in calls, because ranks may have working folders of their own.
        await self._all("save", Folder(str(folder.absolute())), NoneType, timeout_s=self._config.checkpoint.timeout_s)

    async def load(self, folder: Path) -> int:
        """Load a checkpoint to go on from; returns its training step."""
        self._held, self.has_trained = None, True
        self._step = (await self._all("load", Folder(str(folder.absolute())), LoadedStep, timeout_s=self._config.checkpoint.timeout_s)).step
        return self._step

    async def export(self, folder: Path, *, tokenizer: str) -> None:
        """Write a Hugging Face folder, with the tokenizer of the folder `tokenizer`."""
        request = ExportRequest(str(folder.absolute()), tokenizer, self._config.model.number_format)
        await self._all("export", request, NoneType, timeout_s=self._config.checkpoint.timeout_s)

    async def add(self, adapter: NewAdapter) -> None:
        """Add an adapter: a fresh one, or one loaded from a PEFT folder."""
        self.steps[adapter.name] = 0  # the name is taken from here on
        try:
            await self._all("add", adapter, NoneType)
        except BaseException:
            self.steps.pop(adapter.name, None)
            raise

    async def remove(self, name: str) -> None:
        await self._all("remove", AdapterNames((name,)), NoneType)
        self.steps.pop(name, None)

    async def forward(self, batch: Batch) -> Scores:
        """Score the batch's targets, each sequence under its own adapter."""
        return await self._pass("forward", batch)

    async def forward_backward(self, batch: Batch) -> Scores:
        """Score a batch and accumulate the gradients of its losses in its adapters.

        If that fails, none of its adapters keeps a gradient, as another rank may have added its part.
        """
        try:
            return await self._pass("forward_backward", batch)
        except BaseException:
            if self._ranks.alive:
                await self.discard(sorted(set(batch.adapters) & self.steps.keys()))
            raise

    async def discard(self, names: Sequence[str]) -> None:
        """Drop the accumulated gradients of these adapters."""
        await self._all("discard", AdapterNames(tuple(names)), NoneType)

    async def optim_step(self, params: Mapping[str, AdamParams]) -> dict[str, float]:
        """Run one optimizer step of each adapter named. Returns gradient norms by name, not finite where the update was skipped."""
        stepped = await self._all("optim_step", OptimStep(dict(params)), Stepped)
        self.steps.update(stepped.steps)
        return stepped.grad_norms

    async def score_base(self, canary: tuple[int, ...]) -> tuple[float, ...]:
        """Return the log-probability of each of canary[1:] under the base model."""
        return (await self._all("score_base", CanaryTokens(canary), CanaryScores)).logprobs

    async def write_adapter(self, name: str, version: Version, folder: Path, *, canary: tuple[int, ...]) -> Manifest:
        """Write an adapter to a new PEFT folder."""
        written = await self._all("write_weights", WriteRequest(str(folder), self._config.model.number_format, canary, name), Written)
        return Manifest(
            version, str(folder), written.fingerprint, canary, written.canary_logprobs, adapter=name, num_bytes=written.num_bytes)

    async def save_adapter(self, name: str, folder: Path) -> None:
        """Write the full training state of an adapter, from which it goes on exactly."""
        await self._all("save", Folder(str(folder.absolute()), name), NoneType)

    async def restore_adapter(self, name: str, folder: Path, *, optimizer: bool) -> None:
        """Load a folder of `save_adapter`, with its optimizer state or with a fresh optimizer."""
        self.steps[name] = (await self._all("load", Folder(str(folder.absolute()), name, optimizer), LoadedStep)).step

    async def _spread(self, batch: Batch, step: int, *, num_minibatches: int, ahead: bool = False) -> list[TrainStep]:
        params = adam_params(step, config=self._optimizer, total_steps=self._total_steps)
        async with self._spreading:
            return await self._ranks.spread(batch, params, num_minibatches=num_minibatches, seed=self._config.run.seed + step, ahead=ahead)

    async def _pass(self, method: str, batch: Batch) -> Scores:
        shares = self._shares(batch.lengths)
        answers = await self._ranks.call(
            self._name(method), [batch.select(share) for share in shares], Scores, timeout_s=self._config.train.step_timeout_s)
        logprobs, losses = np.zeros(batch.num_targets, np.float32), np.zeros(len(batch), np.float32)
        for share, answer in zip(shares, answers, strict=True):
            logprobs[gather_ranges(batch.target_offsets, share)] = answer.logprobs
            losses[share] = answer.losses
        return Scores(logprobs, losses)

    def _shares(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Balance N sequences by their tokens, `lengths` [N], over ranks, some of which may get none.

        Return the indices of each rank's sequences, [K] int64, ascending, for example [0, 2] and [1] of 3 sequences.
        """
        copies = self._config.train.parallel.ranks_per_share
        num_shares = self._ranks.num_called // copies
        if num_shares == 1 or len(lengths) == 0:
            shares = [np.arange(len(lengths)), *([np.zeros(0, np.int64)] * (num_shares - 1))]
        else:
            shares = [np.sort(np.asarray(part, np.int64)) for part in partition(lengths.astype(np.float64), num_shares).parts]
        return [share for share in shares for _ in range(copies)]

    async def _all(self, method: str, request: Any, reply: type[T], *, timeout_s: float | None = None) -> T:
        """Send one request to all ranks; returns rank 0's answer, or in SPMD mode this rank's."""
        answer, *_ = await self._ranks.call(
            self._name(method), [request] * self._ranks.num_called, reply, timeout_s=timeout_s or self._config.train.step_timeout_s)
        return answer

    def _name(self, method: str) -> str:
        return f"{self._part}.{method}" if self._part else method


def speed(answers: Sequence[Trained]) -> dict[str, float]:
    """Return how well a training step of all ranks used their devices.

    Returns:
        train/tokens_per_s_per_device: tokens of all passes with gradients, prompts included, by the step's time and the number of ranks.
        train/mfu: operations of the model by the devices' peak over the same time, 0 to 1; left out if a device's peak is unknown.
        train/busy_share: mean share of the time for which ranks computed.
        train/peak_memory_bytes: largest peak of any rank so far.
    """
    step_s = max(max(answer.end_s - answer.start_s for answer in answers), 1e-9)
    peak = sum(answer.peak_flop_per_s for answer in answers) if all(answer.peak_flop_per_s for answer in answers) else 0.0
    return {
        "train/tokens_per_s_per_device": sum(answer.tokens for answer in answers) / step_s / len(answers),
        **({"train/mfu": sum(answer.flops for answer in answers) / step_s / peak} if peak else {}),
        "train/busy_share": sum(answer.busy_s for answer in answers) / step_s / len(answers),
        "train/peak_memory_bytes": float(max(answer.memory_bytes for answer in answers)),
    }


def _put_together(batch: Batch, answers: Sequence[ScoredShare]) -> TargetScores:
    """Return the scores of all targets, in the order of the batch."""
    columns: dict[str, np.ndarray] = {}
    for answer in answers:
        targets = gather_ranges(batch.target_offsets, answer.sequences)
        for name, values in answer.scores.columns.items():
            columns.setdefault(name, np.zeros(batch.num_targets, np.float32))[targets] = values
    return TargetScores(columns)
