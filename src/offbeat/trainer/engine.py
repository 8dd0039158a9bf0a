"""One rank's optimizer: called by the train worker, or by the loop itself in SPMD mode.

All ranks call the same methods with their own share of a batch. Loss weights hold global denominators, so gradients are *summed* over
ranks, and any split of a batch over ranks and micro-batches gives the same step. A rank never raises between two collectives for what its
data did: a loss or gradient that is not finite is seen by all ranks, which all leave the update out and report it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from offbeat.algorithms.presets import LossInputs, Objective, objective
from offbeat.checkpoint import shards
from offbeat.checkpoint.export import export_folder
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.train import OptimizerConfig, TrainConfig
from offbeat.data.batch import TokenBatch
from offbeat.data.model_folder import check_model_folder
from offbeat.data.packing import PackedRow, pack_row
from offbeat.dist.mesh import ProcessGroups
from offbeat.dist.platform import current_platform
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import dummy_row, token_logprobs
from offbeat.telemetry.tracker import StatsTracker, reduce
from offbeat.trainer.optim import build_optimizer, learning_rate, set_learning_rate
from offbeat.trainer.state import Dtype, full_state, parameter_bytes
from offbeat.trainer.stats import StepStats, Update, merge
from offbeat.trainer.strategies import Strategy, choose, whole
from offbeat.weights.fingerprint import fingerprint

Minibatch = Sequence[np.ndarray]
"""The micro-batches of one optimizer step on this rank, each [n] int64 sequence indices; as many on every rank, some may be empty."""


class TrainEngine:
    """A model, its optimizer, and the step that trains it.

    Attributes:
        step: training steps done.
        groups: this rank and its peers.
    """

    def __init__(
        self, *, strategy: Strategy, optimizer: torch.optim.Optimizer, chosen: Objective, config: TrainConfig,
        optimizer_config: OptimizerConfig, total_steps: int, temperature: float, groups: ProcessGroups, model_folder: Path,
    ) -> None:
        self.step = 0
        self.groups = groups
        self._strategy = strategy
        self._optimizer = optimizer
        self._objective = chosen
        self._config = config
        self._optimizer_config = optimizer_config
        self._total_steps = total_steps
        self._temperature = temperature
        self._model_folder = model_folder

    @classmethod
    def build(
        cls, model_folder: str | Path, *, config: TrainConfig, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_steps: int,
        groups: ProcessGroups, objective_name: str = "ppo", temperature: float = 1.0,
    ) -> Self:
        """Load float32 weights and lay them over the ranks; collective.

        Args:
            model_folder: Hugging Face folder or hub id, the same on all ranks.
            total_steps: training steps that the learning-rate schedule spans.
            objective_name: "ppo", or "sft" for supervised fine-tuning.
            temperature: > 0, of the sampling; log-probabilities are those of the distribution that sampled.
        """
        model = load_causal_lm(str(model_folder), dtype="float32", attention="packed")
        _silence_dropout(model)
        model.train()
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        strategy = choose(config.strategy, model, groups=groups)
        return cls(
            strategy=strategy, optimizer=build_optimizer(strategy.model, config=optimizer),
            chosen=objective(objective_name, config=algorithm), config=config, optimizer_config=optimizer, total_steps=total_steps,
            temperature=temperature, groups=groups, model_folder=check_model_folder(str(model_folder)))

    def set_objective(self, name: str, *, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_steps: int) -> None:
        """Go on from the present weights towards another objective, "ppo" or "sft", with a fresh optimizer and schedule."""
        self._objective = objective(name, config=algorithm)
        self._optimizer = build_optimizer(self._strategy.model, config=optimizer)
        self._optimizer_config = optimizer
        self._total_steps = total_steps
        self.step = 0

    def train_step(self, batch: TokenBatch, minibatches: Sequence[Minibatch]) -> StepStats:
        """Update the weights once per minibatch; collective.

        Args:
            batch: this rank's share. Its loss weights hold denominators over the batches of all ranks.
            minibatches: optimizer steps, the same number on every rank. With one, the proximal policy is the current one and costs
                nothing; with several, its log-probabilities are computed first. Each of K minibatches holds about 1/K of the loss
                weights, so its loss is scaled by K.
        """
        lr = learning_rate(self.step, config=self._optimizer_config, total_steps=self._total_steps)
        set_learning_rate(self._optimizer, lr)
        plan = [[self._row(batch, indices) for indices in minibatch] for minibatch in minibatches]
        with self.groups.sync.region("train_step"):
            updates = [self._update(batch, rows, prox, scale=len(plan)) for rows, prox in zip(plan, self._prox(plan), strict=True)]
        self.step += 1
        return merge(updates, lr=lr)

    def logprobs(self, batch: TokenBatch, microbatches: Minibatch) -> np.ndarray:
        """[T] float32 log-probabilities of the tokens trained on, 0 on others; collective."""
        result = np.zeros(batch.num_tokens, np.float32)
        for indices in microbatches:
            row = self._row(batch, indices)
            result[row.batch_index] = self._score(row).cpu().numpy()
        return result

    def canary(self, tokens: Sequence[int]) -> float:
        """Mean log-probability at temperature 1, in float32, of all given tokens but the first; collective, equal on all ranks."""
        length = len(tokens)
        zeros = np.zeros(length, np.float32)
        batch = TokenBatch(
            tokens=np.asarray(tokens, np.int32), loss_mask=np.arange(length) > 0, rollout_logprobs=zeros, advantages=zeros,
            loss_weights=zeros, offsets=np.array([0, length]), group_ids=np.zeros(1), prefix_lens=np.zeros(1))
        with self.groups.sync.region("canary"), self._strategy.scoring():
            return token_logprobs(self._strategy.forward, pack_row(batch, share_prefix=False)).mean().item()

    def full_state(self, dtype: Dtype = "float32") -> dict[str, Tensor]:
        """All weights as CPU tensors on rank 0, by checkpoint name, tied ones once; empty on other ranks; collective."""
        return full_state(self._strategy.model, dtype=dtype, keep=self._leads)

    def fingerprint(self, dtype: Dtype) -> str:
        """On rank 0 the fingerprint that an engine finds in these weights when they are published in `dtype`, else ""; collective."""
        return self._fingerprint(self.full_state(dtype))

    def publish(self, folder: Path, *, dtype: Dtype) -> str:
        """Write a Hugging Face folder from rank 0, and return there the fingerprint of what was written, else ""; collective.

        Raises:
            StorageError: on rank 0, after the last collective: the folder could not be written.
        """
        with self.groups.sync.region("publish"):
            state = self.full_state(dtype)
        if self._leads:
            export_folder(state, folder, model_folder=self._model_folder, dtype=dtype)
        return self._fingerprint(state)

    def export(self, folder: Path, *, tokenizer_folder: Path, dtype: Dtype) -> None:
        """Write a Hugging Face folder for others from rank 0, tokenizer included; collective. Raises as `publish`."""
        with self.groups.sync.region("save_hf"):
            state = self.full_state(dtype)
        if self._leads:
            export_folder(state, folder, model_folder=self._model_folder, tokenizer_folder=tokenizer_folder, dtype=dtype)

    def save(self, folder: Path) -> None:
        """Write what `load` needs to go on exactly from here; collective. Raises as `offbeat.checkpoint.shards.save`."""
        shards.save(folder, model=self._strategy.model, optimizer=self._optimizer, step=self.step, groups=self.groups)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, by however many ranks; collective. Raises as `offbeat.checkpoint.shards.load`."""
        self.step = shards.load(folder, model=self._strategy.model, optimizer=self._optimizer, groups=self.groups)

    @property
    def _leads(self) -> bool:
        return self.groups.rank == 0

    def _fingerprint(self, state: dict[str, Tensor]) -> str:
        return fingerprint(parameter_bytes(self._strategy.model, state)) if self._leads else ""

    def _row(self, batch: TokenBatch, indices: np.ndarray) -> PackedRow:
        """The row of some sequences, whose `batch_index` points into the whole batch; the dummy row when they score nothing."""
        part = batch.select(indices)
        row = pack_row(part, share_prefix=self._config.share_prefix)
        if len(row) == 0:
            return dummy_row()
        shifts = np.repeat(batch.offsets[indices] - part.offsets[:-1], part.lengths)
        return replace(row, batch_index=row.batch_index + shifts[row.batch_index])

    def _prox(self, plan: list[list[PackedRow]]) -> list[list[Tensor | None]]:
        """Log-probabilities of every row before the first update; None where the forward pass of the update itself gives them."""
        if len(plan) == 1 or not self._objective.needs_prox:
            return [[None for _ in rows] for rows in plan]
        return [[self._score(row) for row in rows] for rows in plan]

    @property
    def _loss_temperature(self) -> float:
        return self._temperature if self._objective.at_temperature else 1.0

    def _score(self, row: PackedRow) -> Tensor:
        with self._strategy.scoring(), self._autocast():
            return token_logprobs(self._strategy.forward, row, temperature=self._loss_temperature)

    def _update(self, batch: TokenBatch, rows: list[PackedRow], prox: list[Tensor | None], *, scale: int) -> Update:
        tracker = StatsTracker()
        for i, (row, row_prox) in enumerate(zip(rows, prox, strict=True)):
            # The last micro-batch reduces gradients over ranks; earlier ones only accumulate.
            with self._strategy.accumulate(last=i == len(rows) - 1):
                loss = self._loss(batch, row, row_prox, tracker)
                # DDP and FSDP average over ranks; the loss weights want a sum.
                (loss * (scale * self.groups.world)).backward()
        parameters = list(self._strategy.model.parameters())
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        update = Update(reduce(tracker.take(), self.groups.sync, point="train_stats"), grad_norm=whole(norm).item())
        # Every rank has the same numbers here, so all take the same branch.
        if update.is_sound:
            if self._optimizer_config.clip_norm:
                clip_grads_with_norm_(parameters, self._optimizer_config.clip_norm, norm)
            self._optimizer.step()
        # Here rather than before the next step: a checkpoint of an optimizer with pending gradients has no state to resume from.
        self._optimizer.zero_grad(set_to_none=True)
        return update

    def _loss(self, batch: TokenBatch, row: PackedRow, prox: Tensor | None, tracker: StatsTracker) -> Tensor:
        with self._autocast():
            logprobs, entropy = token_logprobs(self._strategy.forward, row, temperature=self._loss_temperature, with_entropy=True)

        def pick(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values[row.batch_index]).to(logprobs.device)

        result = self._objective.loss(LossInputs(
            logprobs=logprobs, prox_logprobs=logprobs.detach() if prox is None else prox,
            rollout_logprobs=pick(batch.rollout_logprobs), advantages=pick(batch.advantages)))
        losses = result.losses * pick(batch.loss_weights)
        with tracker.scope("train"):
            tracker.denominator(tokens=torch.ones_like(losses))
            tracker.stat(reduce="sum", loss=losses)
            tracker.stat(denominator="tokens", entropy=entropy)
        tracker.stat(result.means, denominator="train/tokens")
        tracker.stat(result.maxima, reduce="max")
        return losses.sum()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(current_platform.device_type, torch.bfloat16, enabled=self._config.autocast)


def _silence_dropout(model: PreTrainedModel) -> None:
    """Trained log-probabilities must be those of the policy that the engines sample, which have no dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                vars(module)[name] = 0.0
