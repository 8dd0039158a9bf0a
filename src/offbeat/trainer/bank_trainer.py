"""The trainer of adapters on one frozen model: each trains at its own pace, and any of them train together in one pass.

A run with `model.lora` has a single adapter, whose name is "". A service adds and removes adapters as it likes: gradients accumulate in
each adapter until `optim_step`, which leaves weights, moments and step count of all others unchanged, to the bit. Every rank holds all of
every adapter, also where the model is divided among them: a rank adds its own part of the sum over all ranks to its gradients.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from offbeat.algorithms.adam import AdamParams
from offbeat.config.for_processes import RankConfig
from offbeat.config.objectives import objective_of
from offbeat.data.batch import Batch
from offbeat.data.image_store import images_folder
from offbeat.data.packing import PackedRow, plan_microbatches
from offbeat.errors import ModelError, StorageError, UserError
from offbeat.model.context import share_of
from offbeat.model.divided_read import Divide
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import dummy_row, packs_rows
from offbeat.model.lora import AdapterBank
from offbeat.model.peft_io import Adapter, read_adapter
from offbeat.model.quantized import round_layers
from offbeat.pulse import progress
from offbeat.sync.mesh import ProcessGroups
from offbeat.trainer import shards
from offbeat.trainer.adapter_files import AdapterState, read_adapter_state, write_adapter_state
from offbeat.trainer.messages import AdapterNames, CanaryScores, CanaryTokens, Dtype, Folder, LoadedStep, NewAdapter
from offbeat.trainer.optim import RowAdam
from offbeat.trainer.policy import canary_logprobs, let_replay, load_policy, row_of
from offbeat.trainer.snapshots import AdapterSnapshot
from offbeat.trainer.state import full_state
from offbeat.trainer.strategies import Strategy, load
from offbeat.trainer.trainer import WHOLE, Trainer
from offbeat.weights.adapters import check_many, check_new, find_adapter

T = TypeVar("T")


class BankTrainer(Trainer):
    """A frozen model, a bank of named adapters, and an optimizer for each of them."""

    def __init__(self, model: PreTrainedModel, strategy: Strategy, *, base: str, config: RankConfig, groups: ProcessGroups) -> None:
        """`strategy` distributes `model` over the ranks, and `base` names it in the folders of its adapters."""
        lora = config.model.lora
        super().__init__(strategy.forward, config, groups)
        self._model = model
        self._strategy = strategy
        self._is_sharded = isinstance(strategy.forward, FSDPModule)
        self._bank = AdapterBank(
            model, rank=lora.rank, targets=lora.targets, dropout=lora.dropout, seed=(config.run.seed, groups.rank // groups.shape.tp),
            computes=torch.bfloat16 if self._is_sharded and config.train.computes_in == "bf16_mixed" else torch.float32)
        self._adam = RowAdam(self._bank.weights.detach())
        self._base = base
        self._slots: dict[str, int] = {}
        self._frozen: int | None = None  # slot of the reference's adapter; without one the reference is the base model
        self._norms: dict[str, float] = {}

    @classmethod
    def build(cls, folder: str, *, config: RankConfig, groups: ProcessGroups) -> Self:
        """Load the model for a run that trains one adapter, and distribute it over the ranks; collective.

        `folder` is a Hugging Face folder or hub id, the same on all ranks.

        Raises:
            ModelError: there is no such model, a target matches none of its layers, or it cannot be divided as `choose` says.
        """
        progress("load_model")
        lora = config.model.lora
        trainer = cls(*_load_base(folder, config, groups), base=folder, config=config, groups=groups)
        trainer._enter(WHOLE, trainer._bank.add(rank=lora.rank, scaling=lora.alpha / lora.rank, seed=config.run.seed))
        return trainer

    @classmethod
    def build_empty(cls, folder: str, *, config: RankConfig, groups: ProcessGroups) -> Self:
        """Load the model for adapters that come and go; each rank holds all of it.

        `model.lora.rank` is the largest rank of any adapter; targets apply to all adapters, and each has its own alpha.

        Raises:
            ConfigError: as `check_many`.
            ModelError: there is no such model, it cannot pack its rows, or it has none of the targets.
        """
        check_many(config.model.lora, config.train, shard=groups.shape.shard, tp=groups.shape.tp, ep=groups.shape.ep)
        model, strategy = _load_base(folder, config, groups)
        if not packs_rows(model):
            raise ModelError(f"{type(model).__name__} cannot pack its rows, which many adapters in one pass need; train one at a time")
        return cls(model, strategy, base=folder, config=config, groups=groups)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._slots)

    # -- adapters ----------------------------------------------------------------------------------------------------------------------

    def add(self, request: NewAdapter) -> None:
        """Add an adapter with a fresh optimizer: one that changes nothing yet, or one from a PEFT folder, which is collective.

        Raises:
            ConfigError: the name is taken, or cannot be one.
            ModelError: the rank exceeds the bank's, there are no layers of these kinds, or the folder holds no adapter that fits.
            StorageError: another rank cannot read the folder.
        """
        check_new(request.name, self._slots)
        if not request.folder:
            scaling = request.alpha / request.rank if request.rank else 0.0
            self._enter(request.name, self._bank.add(rank=request.rank, scaling=scaling, seed=request.seed, kinds=request.modules))
            return

        def read() -> Adapter:
            adapter = read_adapter(Path(request.folder))
            self._bank.check(adapter)
            return adapter

        self._enter(request.name, self._bank.put(self._on_all("load_adapter", read, request.folder)))

    def remove(self, request: AdapterNames) -> None:
        """Remove adapters; raises ConfigError if there is none of such a name."""
        self._check(request.names)
        for name in request.names:
            slot = self._slots.pop(name)
            self._bank.remove_slot(slot)
            self._adam.clear(slot)

    def discard(self, request: AdapterNames) -> None:
        """Drop accumulated gradients, for example after a pass that failed on some rank. Raises as `remove`."""
        self._check(request.names)
        self._clear(request.names)

    def score_base(self, request: CanaryTokens) -> CanaryScores:
        """Score tokens under the base model alone, at temperature 1; equal on all ranks, and collective where they share rows."""
        with self.groups.sync.region("canary") if self._shares_rows else nullcontext(), self._strategy.scoring():
            return CanaryScores(canary_logprobs(self._module, request.tokens))

    # -- weights -----------------------------------------------------------------------------------------------------------------------

    def snapshot(
        self, dtype: Dtype, *, name: str = WHOLE, merges: bool = False, copies: bool = True,  # noqa: ARG002
    ) -> AdapterSnapshot:
        """See `Trainer.snapshot`; the adapter is complete on every rank, as it is small, and the model that it is merged into on rank 0."""
        state = self._whole_base() if merges else {}
        return AdapterSnapshot(self._bank.adapter(self._slot(name)), self._model, self._base, self._run.model.lora.dropout, dtype, state)

    def _whole_base(self) -> dict[str, Tensor]:
        """Return the base model's weights as `full_state` does in float32 on rank 0; collective. What was rounded is read again."""
        keeps = self.groups.rank == 0
        if self._run.model.quantization == "none":
            return full_state(self._model, dtype="float32", keep=keeps)
        return full_state(load_causal_lm(self._base, attention=None), dtype="float32", keep=True) if keeps else {}

    def save(self, request: Folder) -> None:
        """See `Trainer.save`; all ranks write a run's state together, rank 0 alone writes a named adapter."""
        if request.name == WHOLE:
            state = self._run_state(with_reference=self._frozen is not None)
            shards.save_state(request.folder, state, groups=self.groups, keeps=request.keeps)
            return
        slot = self._slot(request.name)
        if self.groups.rank == 0:
            write_adapter_state(AdapterState(
                self._steps(request.name), self._bank.adapter(slot), self._bank.unpack(self._adam.exp_avg[slot], slot),
                self._bank.unpack(self._adam.exp_avg_sq[slot], slot)), request.folder)

    def load(self, request: Folder) -> LoadedStep:
        """See `Trainer.load`; a named adapter replaces the one of this name if there is one."""
        if request.name == WHOLE:
            return self._load_run(request)
        if request.name not in self._slots:
            check_new(request.name, self._slots)

        def read() -> tuple[AdapterState, Tensor, Tensor]:
            state = read_adapter_state(request.folder)
            self._bank.check(state.weights)
            return state, self._bank.pack(state.exp_avg), self._bank.pack(state.exp_avg_sq)

        state, exp_avg, exp_avg_sq = self._on_all("restore_adapter", read, request.path)
        if request.name in self._slots:
            self.remove(AdapterNames((request.name,)))
        self._enter(request.name, self._bank.put(state.weights))
        if request.optimizer:
            self._adam.set(self._slots[request.name], exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, step=state.step)
        return LoadedStep(self._steps(request.name))

    def _run_state(self, *, with_reference: bool) -> dict[str, Any]:
        """Return copies of the state of the run's adapter, under the names that a module and its optimizer have in a checkpoint.

        Tensors of the adapter are [1, P]; the reference's is [P], zeros until one is loaded.
        """
        own, weights = slice(self._slot(WHOLE), self._slot(WHOLE) + 1), self._bank.weights.detach()
        moments = {"step": self._adam.steps[own][0], "exp_avg": self._adam.exp_avg[own], "exp_avg_sq": self._adam.exp_avg_sq[own]}
        state = {
            "model": {"weights": weights[own].clone(), "num_passes": self._bank.num_passes.clone()},
            "optimizer": {"state": {"weights": {name: tensor.clone() for name, tensor in moments.items()}}}, "step": self.step}
        if with_reference:
            frozen = torch.zeros_like(weights[0]) if self._frozen is None else weights[self._frozen].clone()
            state["reference"] = {"weights": frozen}
        return state

    def _load_run(self, request: Folder) -> LoadedStep:
        kept = self._keeps_reference and shards.holds(request.folder, "reference")
        state = shards.load(request.folder, self._run_state(with_reference=kept), groups=self.groups)
        model, moments, slot = state["model"], state["optimizer"]["state"]["weights"], self._slot(WHOLE)
        with torch.no_grad():
            self._bank.weights[slot] = model["weights"][0]
            self._bank.num_passes.copy_(model["num_passes"])
        self._adam.set(slot, exp_avg=moments["exp_avg"][0], exp_avg_sq=moments["exp_avg_sq"][0], step=moments["step"])
        if kept:
            self._freeze(state["reference"]["weights"])
        elif self._frozen is not None:
            self._bank.remove_slot(self._frozen)
            self._frozen = None
        self.step = state["step"]
        return LoadedStep(self.step)

    def _freeze(self, row: Tensor) -> None:
        """Let the reference have the run's adapter with these weights, [P] float32."""
        if self._frozen is None:
            self._frozen = self._bank.put(self._bank.adapter(self._slot(WHOLE)))
            self._adam.follow(self._bank.weights.detach())
        with torch.no_grad():
            self._bank.weights[self._frozen] = row

    # -- see `Trainer` -----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _referring(self) -> Iterator[nn.Module]:
        adapted = nullcontext() if self._frozen is None else self._bank.using(self._bank.route_all(self._frozen))
        with adapted, self._strategy.scoring():
            yield self._module

    def _refresh_reference(self) -> None:
        self._freeze(self._bank.weights.detach()[self._slot(WHOLE)].clone())

    def _renew_optimizer(self) -> None:
        for slot in self._slots.values():
            self._adam.clear(slot)

    def _check(self, names: Collection[str]) -> None:
        for name in names:
            self._slot(name)

    def _rows(self, batch: Batch, microbatches: Sequence[np.ndarray]) -> list[PackedRow]:
        slots = self._slots_of(batch)
        return [row if len(row) else dummy_row() for row in self._packed(_apart(batch, slots), slots, microbatches)]

    def _own_rows(self, batch: Batch) -> list[PackedRow]:
        slots = self._slots_of(batch)
        apart = _apart(batch, slots)
        plan = plan_microbatches(
            apart, num_ranks=1, max_tokens=self._config.max_tokens_per_microbatch, share_prefix=self._config.share_prefix)
        rows = [row for row in self._packed(apart, slots, plan.microbatches[0]) if len(row)]
        if self._is_sharded:
            most = self.groups.sync.max_scalars("forward_rows", {"rows": len(rows)})["rows"]
            rows += [dummy_row()] * (int(most) - len(rows))
        elif self._shares_rows:
            self.groups.sync.arrive("forward_rows")
        return rows

    @property
    def _shares_rows(self) -> bool:
        """Whether ranks run rows together, so that each forward pass is collective."""
        return self.groups.shape.ranks_per_share > 1

    def _packed(self, apart: Batch, slots: np.ndarray, microbatches: Sequence[np.ndarray]) -> Iterator[PackedRow]:
        return (row_of(apart, indices, share_prefix=self._config.share_prefix, families=slots) for indices in microbatches)

    @contextmanager
    def _using(self, batch: Batch, row: PackedRow, *, learn: bool, last: bool = True) -> Iterator[None]:
        share = share_of(self._model, row)
        route = (
            self._bank.route(share.row, self._slots_of(batch), here=share.here) if len(row.target)
            else self._bank.route_all(min(self._slots.values())))
        drops = learn and any(objective_of(loss.name).drops_inputs for loss in batch.losses)
        with self._bank.using(route, drops=drops), self._strategy.accumulate(last=last) if learn else self._strategy.scoring():
            yield

    @contextmanager
    def _published(self, name: str, dtype: Dtype) -> Iterator[None]:  # noqa: ARG002
        with self._bank.using(self._bank.route_all(self._slot(name))), self._strategy.scoring():
            yield

    def _gradient_norms(self, names: Sequence[str]) -> dict[str, float]:
        slots = [self._slot(name) for name in names]
        gradients = [self._bank.gradients[slot] for slot in slots]
        if self.groups.world > 1 and names:
            summed = torch.stack(gradients)
            dist.all_reduce(summed)
            self._bank.gradients[slots] = summed
            gradients = list(summed)
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).tolist() if names else []
        self._norms = dict(zip(names, norms, strict=True))
        return self._norms

    def _step(self, name: str, params: AdamParams) -> None:
        slot = self._slot(name)
        self._adam.update(slot, self._bank.gradients[slot], params, norm=self._norms[name])

    def _try_step(self, name: str, params: AdamParams) -> bool:
        slot = self._slot(name)
        return self._adam.try_update(slot, self._bank.gradients[slot], params, norm=self._norms[name])

    def _weights(self) -> Iterable[Tensor]:
        return [self._bank.weights[slot] for slot in self._slots.values()]

    def _steps(self, name: str) -> int:
        return int(self._adam.steps[self._slot(name)])

    def _clear(self, names: Collection[str]) -> None:
        for name in names:
            self._bank.gradients[self._slot(name)] = 0.0

    def _slot(self, name: str) -> int:
        return find_adapter(name, self._slots)

    def _slots_of(self, batch: Batch) -> np.ndarray:
        """Return [N] int64, the slot of each sequence's adapter."""
        names = batch.adapters or ((WHOLE,) if len(batch) else ())
        return np.array([self._slot(name) for name in names], np.int64)[batch.ids("adapter_ids")]

    def _enter(self, name: str, slot: int) -> None:
        self._adam.follow(self._bank.weights.detach())
        self._slots[name] = slot

    def _on_all(self, point: str, read: Callable[[], T], folder: str) -> T:
        """Call `read` on every rank and return its result, unless it fails on some rank, so that no rank goes on alone; collective."""
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


def _load_base(folder: str, config: RankConfig, groups: ProcessGroups) -> tuple[PreTrainedModel, Strategy]:
    """Load the frozen model, whole or divided, and distribute it over the ranks; collective."""

    def read(divide: Divide | None) -> PreTrainedModel:
        model = load_policy(
            folder, config=config.train, dtype=config.model.number_format, divide=divide,
            float32_head=config.algorithm.float32_head, images=images_folder(config.run_dir))
        if config.model.quantization != "none":
            round_layers(model, config.model.quantization)
        return let_replay(model, config.model).requires_grad_(False)

    # A model that is whole on its rank computes under autocast, also on a single one.
    return load(read, groups=groups, precision=config.train.computes_in if groups.shape.divides else "float32", trained=False)


def _apart(batch: Batch, slots: np.ndarray) -> Batch:
    """Split groups by the adapter in `slots` [N] int64: adapters compute different states of the same prompt, so they never share it."""
    _, group_ids = np.unique(np.stack([batch.group_ids, slots]), axis=1, return_inverse=True)
    return replace(batch, sequences={**batch.sequences, "group_ids": group_ids.reshape(-1)})
