"""One rank's optimizer: called by the train worker, or by the loop itself in SPMD mode.

All ranks call the same methods with their own share of a batch. Loss weights hold global denominators, so gradients are *summed* over
ranks, and any split of a batch over ranks and micro-batches gives the same step. A rank never raises between two collectives for what its
data did: a loss or gradient that is not finite is seen by all ranks, which all leave the update out and report it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from offbeat.algorithms.presets import Objective, objective
from offbeat.checkpoint import shards
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.model import LoraConfig
from offbeat.config.train import OptimizerConfig, TrainConfig
from offbeat.data.batch import TokenBatch
from offbeat.data.model_folder import check_model_folder
from offbeat.data.packing import PackedRow
from offbeat.dist.mesh import ProcessGroups
from offbeat.dist.offer import Offer
from offbeat.model.logprobs import dummy_row, token_logprobs
from offbeat.pulse import progress
from offbeat.telemetry.tracker import StatsTracker, reduce
from offbeat.trainer.optim import build_optimizer, learning_rate, set_learning_rate
from offbeat.trainer.policy import autocast, canary_logprobs, load_policy, row_of, score_row
from offbeat.trainer.products import AdapterOfModel, Copy, Product, WholeModel
from offbeat.trainer.state import Dtype
from offbeat.trainer.stats import StepStats, Update, merge
from offbeat.trainer.strategies import Adapted, Strategy, choose, whole

Minibatch = Sequence[np.ndarray]
"""The micro-batches of one optimizer step on this rank, each [n] int64 sequence indices; as many on every rank, some may be empty."""


WHOLE_MODEL = LoraConfig(rank=0)


class TrainEngine:
    """A model, its optimizer, and the step that trains it.

    Attributes:
        step: training steps done.
        groups: this rank and its peers.
    """

    def __init__(
        self, *, strategy: Strategy, product: Product, optimizer: torch.optim.Optimizer, chosen: Objective, config: TrainConfig,
        optimizer_config: OptimizerConfig, total_steps: int, temperature: float, groups: ProcessGroups,
    ) -> None:
        self.step = 0
        self.groups = groups
        self._strategy = strategy
        self._product = product
        self._optimizer = optimizer
        self._objective = chosen
        self._config = config
        self._optimizer_config = optimizer_config
        self._total_steps = total_steps
        self._temperature = temperature

    @classmethod
    def build(
        cls, model_folder: str | Path, *, config: TrainConfig, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_steps: int,
        groups: ProcessGroups, objective_name: str = "ppo", temperature: float = 1.0, lora: LoraConfig = WHOLE_MODEL,
        frozen_dtype: Dtype = "float32", seed: int = 0,
    ) -> Self:
        """Load weights and lay them over the ranks; collective.

        Args:
            model_folder: Hugging Face folder or hub id, the same on all ranks.
            total_steps: training steps that the learning-rate schedule spans.
            objective_name: "ppo", or "sft" for supervised fine-tuning.
            temperature: > 0, of the sampling; log-probabilities are those of the distribution that sampled.
            lora: an adapter to train instead of the whole model, whose weights then stay as they are.
            frozen_dtype: number format of weights that are not trained; those that are trained are float32.
            seed: of a fresh adapter.
        """
        progress("load_model")
        folder = check_model_folder(str(model_folder))
        if lora.rank:
            model = load_policy(str(model_folder), config=config, dtype=frozen_dtype)
            strategy = Adapted(model, groups, lora=lora, seed=seed)
            product = AdapterOfModel(strategy.model, strategy.slot, model=model, base=str(model_folder), dropout=lora.dropout)
        else:
            model = load_policy(str(model_folder), config=config)
            strategy = choose(config.strategy, model, groups=groups)
            product = WholeModel(model, folder)
        return cls(
            strategy=strategy, product=product, optimizer=build_optimizer(strategy.model, config=optimizer),
            chosen=objective(objective_name, config=algorithm), config=config, optimizer_config=optimizer, total_steps=total_steps,
            temperature=temperature, groups=groups)

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

    def canary(self, tokens: Sequence[int], *, dtype: Dtype = "float32") -> tuple[float, ...]:
        """Log-probability at temperature 1, without autocast, of each given token but the first; collective, equal on all ranks.

        Args:
            dtype: under the weights as they are published in this number format.
        """
        with self.groups.sync.region("canary"), self._product.rounded(dtype), self._strategy.scoring():
            return canary_logprobs(self._strategy.forward, tokens)

    def copy(self, dtype: Dtype = "float32") -> Copy:
        """What is trained, as it is now, on rank 0; collective."""
        return self._product.copy(dtype, keep=self._leads)

    def fingerprint(self, dtype: Dtype) -> str:
        """On rank 0 the fingerprint that an engine finds in what is published in `dtype`, else ""; collective."""
        copy = self.copy(dtype)
        return copy.fingerprint() if self._leads else ""

    def publish(self, folder: Path, *, dtype: Dtype) -> str:
        """Write from rank 0 what engines load, and return there its fingerprint, else ""; collective.

        Args:
            folder: will hold the whole model in Hugging Face's format, or the adapter in PEFT's.
            dtype: of a whole model; an adapter is float32.

        Raises:
            StorageError: on rank 0, after the last collective: the folder could not be written.
        """
        with self.groups.sync.region("publish"):
            copy = self.copy(dtype)
        if not self._leads:
            return ""
        copy.publish(folder)
        return copy.fingerprint()

    def offer(self, folder: Path, *, dtype: Dtype, host: str, num_receivers: int, timeout_s: float) -> tuple[str, Offer | None]:
        """Offer from rank 0 what engines load by broadcast, and return there its fingerprint and the offer; collective.

        Returns:
            "" and None on other ranks; a fingerprint and None where it was written to `folder` as by `publish`, which is how adapters go.

        Raises:
            PortBusyError: on rank 0, after the last collective: nothing can be served on this host.
        """
        with self.groups.sync.region("publish"):
            copy = self.copy(dtype)
        if not self._leads:
            return "", None
        fingerprint = copy.fingerprint()
        return fingerprint, copy.offer(folder, host=host, num_receivers=num_receivers, timeout_s=timeout_s)

    def export(self, folder: Path, *, tokenizer_folder: Path, dtype: Dtype) -> None:
        """Write a Hugging Face folder for others from rank 0, tokenizer included; collective. Raises as `publish`.

        An adapter is merged into the model, and also written by itself, as `adapter` in the folder.
        """
        with self.groups.sync.region("save_hf"):
            copy = self.copy(dtype)
        if self._leads:
            copy.export(folder, tokenizer_folder=tokenizer_folder)

    def save(self, folder: Path) -> None:
        """Write what `load` needs to go on exactly from here; collective. Raises as `offbeat.checkpoint.shards.save`."""
        shards.save(folder, model=self._strategy.model, optimizer=self._optimizer, step=self.step, groups=self.groups)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, by however many ranks; collective. Raises as `offbeat.checkpoint.shards.load`."""
        self.step = shards.load(folder, model=self._strategy.model, optimizer=self._optimizer, groups=self.groups)

    @property
    def _leads(self) -> bool:
        return self.groups.rank == 0

    def _row(self, batch: TokenBatch, indices: np.ndarray) -> PackedRow:
        """The row of some sequences; the dummy row when they score nothing."""
        row = row_of(batch, indices, share_prefix=self._config.share_prefix)
        return row if len(row) else dummy_row()

    def _prox(self, plan: list[list[PackedRow]]) -> list[list[Tensor | None]]:
        """Log-probabilities of every row before the first update; None where the forward pass of the update itself gives them."""
        if len(plan) == 1 or not self._objective.needs_prox:
            return [[None for _ in rows] for rows in plan]
        return [[self._score(row) for row in rows] for rows in plan]

    def _score(self, row: PackedRow) -> Tensor:
        progress("forward")
        with self._strategy.scoring(), autocast(self._config):
            return token_logprobs(self._strategy.forward, row, temperature=self._objective.temperature(self._temperature))

    def _update(self, batch: TokenBatch, rows: list[PackedRow], prox: list[Tensor | None], *, scale: int) -> Update:
        tracker = StatsTracker()
        # A ratio is between the policy and the one that sampled, and neither drops inputs.
        drops = self._objective.name == "sft"
        for i, (row, row_prox) in enumerate(zip(rows, prox, strict=True)):
            # The last micro-batch reduces gradients over ranks; earlier ones only accumulate.
            with self._strategy.accumulate(last=i == len(rows) - 1, drops=drops):
                progress("forward")
                loss = self._loss(batch, row, row_prox, tracker)
                progress("backward")
                # DDP and FSDP average over ranks; the loss weights want a sum.
                (loss * (scale * self.groups.world)).backward()
        parameters = list(self._strategy.model.parameters())
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        update = Update(reduce(tracker.take(), self.groups.sync, point="train_stats"), grad_norm=whole(norm).item())
        # Every rank has the same numbers here, so all take the same branch.
        if update.is_sound:
            if self._optimizer_config.clip_norm:
                clip_grads_with_norm_(parameters, self._optimizer_config.clip_norm, norm)
            progress("optimizer")
            self._optimizer.step()
        # Here rather than before the next step: a checkpoint of an optimizer with pending gradients has no state to resume from.
        self._optimizer.zero_grad(set_to_none=True)
        return update

    def _loss(self, batch: TokenBatch, row: PackedRow, prox: Tensor | None, tracker: StatsTracker) -> Tensor:
        with autocast(self._config):
            scored = score_row(
                self._strategy.forward, batch, row, chosen=self._objective, temperature=self._temperature, prox=prox)
        with tracker.scope("train"):
            tracker.denominator(tokens=torch.ones_like(scored.losses))
            tracker.stat(reduce="sum", loss=scored.losses)
            tracker.stat(denominator="tokens", entropy=scored.entropy)
        tracker.stat(scored.found.means, denominator="train/tokens")
        tracker.stat(scored.found.maxima, reduce="max")
        return scored.losses.sum()
