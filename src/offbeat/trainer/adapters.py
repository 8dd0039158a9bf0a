"""One rank's share of many adapters over one frozen model: each trains at its own pace, and any of them together in one pass.

Called by the train worker for each tenant's requests. Gradients add up in their adapters until `optim_step`, which sums them over the
ranks; what an adapter that is not named has, weights, moments and step count, keeps every bit. Methods that say "collective" must be called
by every rank, with the same names; the others compute on this rank alone, so that a bad batch disturbs nobody.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.algorithms.adam import AdamParams
from offbeat.algorithms.presets import objective
from offbeat.checkpoint.adapters import AdapterState, read_adapter_state, write_adapter_state
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.root import Config
from offbeat.data.batch import TokenBatch
from offbeat.data.datums import DatumBatch
from offbeat.data.packing import PackedRow, plan_microbatches
from offbeat.dist.mesh import ProcessGroups
from offbeat.dist.platform import current_platform
from offbeat.errors import ConfigError, DataError, ModelError, StorageError, UserError
from offbeat.model.logprobs import packs_rows, token_logprobs
from offbeat.model.lora import LAYER_KINDS, AdapterBank
from offbeat.model.lora_routes import Route
from offbeat.model.peft_io import Adapter, read_adapter, write_adapter
from offbeat.pulse import progress
from offbeat.telemetry.tracker import StatsPart
from offbeat.trainer.adapter_types import AdapterPass, DatumPass, WrittenAdapter
from offbeat.trainer.datum_pass import DatumResults, layout
from offbeat.trainer.heap import Heap
from offbeat.trainer.optim import RowAdam
from offbeat.trainer.policy import ScoredRow, autocast, canary_logprobs, load_policy, row_of, score_row
from offbeat.weights.adapters import check_adapter

T = TypeVar("T")


class AdapterEngine:
    """A frozen model, a bank of named adapters, and an optimizer for each.

    Attributes:
        groups: this rank and its peers.
    """

    def __init__(self, model: nn.Module, *, base: str, config: Config, groups: ProcessGroups) -> None:
        """`base` names the model in the folders of its adapters."""
        lora = config.model.lora
        self.groups = groups
        self._model = model.to(current_platform.device)
        self._bank = AdapterBank(model, rank=lora.rank, targets=lora.targets)
        self._adam = RowAdam(self._bank.weights.detach())
        self._base = base
        self._config = config.train
        self._temperature = config.rollout.temperature or 1.0
        self._slots: dict[str, int] = {}
        self._heap = Heap()

    @classmethod
    def build(cls, model_folder: str | Path, *, config: Config, groups: ProcessGroups) -> Self:
        """Load the model.

        Args:
            model_folder: Hugging Face folder or hub id, the same on all ranks.
            config: `model.lora.rank` is the largest of an adapter here; targets are those of all, alpha is each one's own.

        Raises:
            ConfigError: model.lora.rank is 0, or model.lora.dropout is not.
            ModelError: no such model, it cannot pack its rows, or it has none of the targets.
        """
        lora = config.model.lora
        if not lora.rank:
            raise ConfigError("model.lora.rank must be at least 1 to train adapters, got 0; give the largest rank of any of them")
        if lora.dropout:
            raise ConfigError(
                f"model.lora.dropout must be 0 to train many adapters, got {lora.dropout}; what one drops would depend on the others")
        model = load_policy(str(model_folder), config=config.train, dtype=config.model.dtype)
        if not packs_rows(model):
            raise ModelError(f"{type(model).__name__} cannot pack its rows, which many adapters in one pass need; train one at a time")
        return cls(model, base=str(model_folder), config=config, groups=groups)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the adapters that are here."""
        return tuple(self._slots)

    def add(self, name: str, *, rank: int, alpha: float, seed: int, modules: Collection[str] = LAYER_KINDS) -> None:
        """Make an adapter; equal seeds give equal weights.

        Args:
            modules: kinds of layers that it trains, of `LAYER_KINDS`; it has no weights for others.

        Raises:
            ConfigError: the name is taken, or cannot be one.
            ModelError: the rank exceeds the bank's, or there are no layers of these kinds.
        """
        self._check_new(name)
        self._enter(name, self._bank.add(rank=rank, scaling=alpha / rank if rank else 0.0, seed=seed, kinds=modules))

    def load(self, name: str, folder: Path) -> None:
        """Make an adapter from a PEFT folder, with a fresh optimizer; collective.

        Raises:
            ConfigError: the name is taken, or cannot be one.
            ModelError: the folder is no adapter that fits here.
            StorageError: another rank cannot read it.
        """
        self._check_new(name)

        def read() -> Adapter:
            adapter = read_adapter(folder)
            self._bank.check(adapter)
            return adapter

        self._enter(name, self._bank.put(self._on_all("load_adapter", read, folder)))

    def remove(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            ConfigError: there is none of this name, as in all methods below.
        """
        slot = self._slot(name)
        self._bank.remove(slot)
        self._adam.clear(slot)
        del self._slots[name]

    def forward_backward(
        self, batch: TokenBatch, adapters: Sequence[str], *, objective_name: str, algorithm: AlgorithmConfig,
    ) -> AdapterPass:
        """Score a batch and add its gradients to those of its adapters.

        Args:
            batch: this rank's share. Its loss weights hold each adapter's own denominators, over the shares of all ranks.
            adapters: [N] names, of each sequence.
            objective_name: "ppo", or "sft" for supervised fine-tuning.

        Raises:
            ConfigError: no such objective, or adapter.
            DataError: a sequence is longer than a micro-batch may be, or there are not as many names as sequences.
        """
        chosen = objective(objective_name, config=algorithm)
        stats, logprobs = _AdapterStats(adapters), np.zeros(batch.num_tokens, np.float32)
        for row, route, sequences in self._rows(batch, adapters):
            with self._bank.using(route):
                with autocast(self._config):
                    scored = score_row(self._model, batch, row, chosen=chosen, temperature=self._temperature)
                scored.losses.sum().backward()
            logprobs[row.batch_index] = scored.logprobs.detach().cpu().numpy()
            stats.add(scored, sequences)
        return AdapterPass(stats.take(), logprobs)

    def forward(self, batch: TokenBatch, adapters: Sequence[str]) -> np.ndarray:
        """[T] float32 log-probabilities of the tokens where loss_mask is True, at the temperature of the sampling, 0 on others.

        Raises as `forward_backward`.
        """
        logprobs = np.zeros(batch.num_tokens, np.float32)
        for row, route, _ in self._rows(batch, adapters):
            with torch.no_grad(), self._bank.using(route), autocast(self._config):
                logprobs[row.batch_index] = token_logprobs(self._model, row, temperature=self._temperature).cpu().numpy()
        return logprobs

    def run_datums(self, batch: DatumBatch, adapters: Sequence[str], *, learn: bool) -> DatumPass:
        """Score datums, and if `learn` add the gradients of the sum of their losses to those of their adapters.

        Args:
            batch: this rank's share.
            adapters: [N] names, of each datum.

        Raises:
            ConfigError: no such adapter.
            DataError: a datum is longer than a micro-batch may be, or there are not as many names as datums; nothing was computed.
        """
        try:
            return self._run_datums(batch, adapters, learn=learn)
        finally:
            self._heap.settle()

    def _run_datums(self, batch: DatumBatch, adapters: Sequence[str], *, learn: bool) -> DatumPass:
        packed = layout(batch, max_tokens=self._config.max_tokens_per_microbatch)
        results = DatumResults(batch)
        for row, route, _ in self._rows(packed, adapters):
            with self._bank.using(route), torch.set_grad_enabled(learn):
                with autocast(self._config):
                    loss = results.run(self._model, row)
                if learn:
                    loss.backward()
        return results.take()

    def discard(self, names: Sequence[str]) -> None:
        """Drop the gradients that wait for a step, as after a pass that failed on some rank."""
        for name in names:
            self._bank.gradients[self._slot(name)] = 0.0

    def step_of(self, name: str) -> int:
        """Optimizer steps that an adapter has taken."""
        return int(self._adam.steps[self._slot(name)])

    @torch.no_grad()
    def optim_step(self, params: Mapping[str, AdamParams]) -> dict[str, float]:
        """Update the named adapters with the gradients of all ranks; collective. Gradients of zero are a step like any other.

        Returns:
            By name the norm of the gradient before clipping. Where that is not finite, the adapter keeps its weights, moments and step
            count; its gradient is gone all the same.
        """
        names = sorted(params)
        slots = [self._slot(name) for name in names]
        self.groups.sync.arrive("optim_step", keys=names)
        gradients = [self._bank.gradients[slot] for slot in slots]
        if self.groups.world > 1 and names:
            with self.groups.sync.region("optim_step_gradients"):
                summed = torch.stack(gradients)
                dist.all_reduce(summed, group=self.groups.mesh.get_group("dp"))
                gradients = list(summed)
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).tolist() if names else []
        for name, slot, gradient, norm in zip(names, slots, gradients, norms, strict=True):
            if math.isfinite(norm):
                self._adam.update(slot, gradient, params[name], norm=norm)
        self.discard(names)
        return dict(zip(names, norms, strict=True))

    def save(self, name: str, folder: Path) -> None:
        """Write from rank 0 what `restore` needs to go on exactly from here; gradients that wait for a step are not part of it.

        Raises:
            StorageError: on rank 0: it cannot be written; what was there before is intact.
        """
        slot = self._slot(name)
        if self._leads:
            write_adapter_state(AdapterState(
                int(self._adam.steps[slot]), self._bank.adapter(slot), self._bank.unpack(self._adam.exp_avg[slot], slot),
                self._bank.unpack(self._adam.exp_avg_sq[slot], slot)), folder)

    def restore(self, name: str, folder: Path, *, optimizer: bool = True) -> None:
        """Make an adapter from what `save` wrote, in place of the one of this name if there is one; collective.

        Args:
            optimizer: go on with its moments and step count, too; otherwise with fresh ones.

        Raises:
            StorageError: there is no checkpoint that this rank, or another, can read; nothing is changed.
            ModelError: it does not fit here.
        """
        if name not in self._slots:
            self._check_new(name)

        def read() -> tuple[AdapterState, Tensor, Tensor]:
            state = read_adapter_state(folder)
            self._bank.check(state.weights)
            return state, self._bank.pack(state.exp_avg), self._bank.pack(state.exp_avg_sq)

        state, exp_avg, exp_avg_sq = self._on_all("restore_adapter", read, folder)
        if name in self._slots:
            self.remove(name)
        self._enter(name, self._bank.put(state.weights))
        if optimizer:
            self._adam.set(self._slots[name], exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, step=state.step)

    def write(self, name: str, folder: Path) -> WrittenAdapter:
        """Write a PEFT folder from rank 0; the answer is equal on all ranks.

        Raises:
            StorageError: on rank 0: it cannot be written, or is there already.
        """
        adapter = self._bank.adapter(self._slot(name))
        if self._leads:
            write_adapter(adapter, folder, base_model=self._base)
        return WrittenAdapter(str(folder), adapter.fingerprint(), adapter.num_bytes)

    def canary(self, name: str, tokens: Sequence[int]) -> tuple[float, ...]:
        """Log-probability at temperature 1, without autocast, of each given token but the first; equal on all ranks.

        Args:
            name: of an adapter; "" is the base model alone.
        """
        with torch.no_grad(), self._bank.using(self._bank.route_all(self._slot(name))) if name else nullcontext():
            return canary_logprobs(self._model, tokens)

    @property
    def _leads(self) -> bool:
        return self.groups.rank == 0

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            raise ConfigError(f"there is no adapter {name[:120]!r} here, only {', '.join(self._slots) or 'none'}; add it first")
        return self._slots[name]

    def _check_new(self, name: str) -> None:
        if check_adapter(name) in self._slots:
            raise ConfigError(f"there is an adapter {name!r} already; choose another name, or remove it first")

    def _enter(self, name: str, slot: int) -> None:
        self._adam.follow(self._bank.weights.detach())
        self._slots[name] = slot

    def _on_all(self, point: str, read: Callable[[], T], folder: Path) -> T:
        """What `read` gives, once it has given it on every rank, so that no rank goes on alone; collective."""
        try:
            result, error = read(), None
        except UserError as exc:
            result, error = None, exc
        num_failed = int(self.groups.sync.sum_scalars(point, {"failed": error is not None})["failed"])
        if error is not None:
            raise error
        if num_failed:
            raise StorageError(
                f"{num_failed} of {self.groups.world} ranks could not read {folder}; it must lie on a disk that all ranks see")
        return result  # pyright: ignore[reportReturnType]

    def _rows(self, batch: TokenBatch, adapters: Sequence[str]) -> Iterator[tuple[PackedRow, Route, np.ndarray]]:
        """The batch in micro-batches: each a row, its route, and the sequence [M] of each of its scored tokens."""
        if len(adapters) != len(batch):
            raise DataError(f"each sequence needs an adapter; got {len(adapters)} names for {len(batch)} sequences")
        slots = np.array([self._slot(name) for name in adapters], np.int64)
        # What two adapters make of one prompt differs, so that they never share it.
        _, group_ids = np.unique(np.stack([batch.group_ids, slots]), axis=1, return_inverse=True)
        apart = replace(batch, group_ids=group_ids.reshape(-1))
        share_prefix = self._config.share_prefix
        plan = plan_microbatches(
            apart, num_ranks=1, max_tokens=self._config.max_tokens_per_microbatch, share_prefix=share_prefix)
        for indices in plan.microbatches[0]:
            row = row_of(apart, indices, share_prefix=share_prefix, families=slots)
            if len(row):
                sequences = np.searchsorted(batch.offsets, row.batch_index, side="right") - 1
                progress("forward")
                yield row, self._bank.route(row, slots), sequences


class _AdapterStats:
    """Statistics of each adapter's tokens, collected on the device and read back once."""

    def __init__(self, adapters: Sequence[str]) -> None:
        """`adapters` is [N], of each sequence."""
        self._names = sorted(set(adapters))
        self._of_sequence = np.array([self._names.index(name) for name in adapters], np.int64)
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, scored: ScoredRow, sequences: np.ndarray) -> None:
        """`sequences` is [M], of each token."""
        where = torch.from_numpy(self._of_sequence[sequences]).to(scored.losses.device)
        ones = torch.ones_like(scored.losses)
        values = {
            "train/tokens": ones, "train/loss": scored.losses, "train/entropy": scored.entropy, "train/logprob": scored.logprobs,
            **scored.found.means}
        for name, value in values.items():
            total = self._sums.setdefault(name, torch.zeros(len(self._names), dtype=torch.float64, device=where.device))
            total.index_add_(0, where, value.detach().double())
        for name, value in scored.found.maxima.items():
            largest = self._maxima.setdefault(name, torch.full((len(self._names),), -math.inf, dtype=torch.float64, device=where.device))
            largest.scatter_reduce_(0, where, value.detach().double(), "amax")

    def take(self) -> dict[str, StatsPart]:
        """By adapter."""
        sums = {name: total.tolist() for name, total in self._sums.items()}
        maxima = {name: largest.tolist() for name, largest in self._maxima.items()}
        tokens = sums.pop("train/tokens", [0.0] * len(self._names))
        losses = sums.pop("train/loss", [0.0] * len(self._names))
        return {
            name: StatsPart(
                sums={"train/tokens": tokens[i], "train/loss": losses[i]},
                means={key: (total[i], tokens[i]) for key, total in sums.items()},
                maxima={key: largest[i] for key, largest in maxima.items()})
            for i, name in enumerate(self._names)}
