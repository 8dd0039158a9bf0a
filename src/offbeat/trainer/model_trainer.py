"""The trainer of a whole model, which its strategy distributes over the ranks."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import PreTrainedModel

from offbeat.algorithms.adam import AdamParams
from offbeat.config.for_processes import RankConfig
from offbeat.data.batch import Batch
from offbeat.data.image_store import images_folder
from offbeat.data.model_folder import check_model_folder
from offbeat.data.packing import PackedRow, plan_microbatches
from offbeat.errors import ConfigError
from offbeat.model.divided_read import Divide
from offbeat.model.images import images_of
from offbeat.model.logprobs import dummy_row
from offbeat.pulse import progress
from offbeat.sync.mesh import ProcessGroups
from offbeat.trainer import shards
from offbeat.trainer.frozen import load_frozen
from offbeat.trainer.messages import Dtype, Folder, LoadedStep, WriteRequest, Written
from offbeat.trainer.optim import build_optimizer, clip_gradients, gradient_norm, set_params
from offbeat.trainer.parts import PartWriter
from offbeat.trainer.policy import let_replay, load_policy, row_of
from offbeat.trainer.snapshots import ModelSnapshot
from offbeat.trainer.state import full_state, rounded
from offbeat.trainer.strategies import Strategy, load
from offbeat.trainer.trainer import WHOLE, Trainer
from offbeat.trainer.weight_exchange import WeightExchange


class ModelTrainer(Trainer):
    """A model, its optimizer, and if the configuration needs it a reference: a frozen copy of the initial weights; the only name is ""."""

    def __init__(self, model: PreTrainedModel, strategy: Strategy, *, folder: str, config: RankConfig, groups: ProcessGroups) -> None:
        """`strategy` distributes `model`, which was loaded from the folder or hub id `folder`, over the ranks."""
        super().__init__(strategy.forward, config, groups)
        self._model = model
        self._model_folder = check_model_folder(folder)
        self._strategy = strategy
        self._exchange = WeightExchange.of(model, groups)
        self._optimizer = self._build_optimizer()
        self._reference = self._load_reference() if self._keeps_reference else None
        self._refreshed = False
        self._updates = 0
        self._norm: Tensor = torch.zeros(())
        self._parts = None if self._exchange is None else PartWriter(
            ModelSnapshot(model, self._model_folder, {}, "float32"), self._exchange, groups, timeout_s=config.weights.stage_timeout_s,
            keeps_last=config.weights.sends_changes)

    @classmethod
    def build(cls, folder: str, *, config: RankConfig, groups: ProcessGroups) -> Self:
        """Load weights in float32 and distribute them over the ranks; collective. `folder` is a folder or hub id, the same on all ranks."""
        progress("load_model")
        check_model_folder(folder)
        model, strategy = load(
            lambda divide: cls._load_model(folder, config, divide), groups=groups, precision=config.train.computes_in,
            compiles=config.train.compile)
        if (images := images_of(model)) is not None:
            images.touches_all = groups.gradient_mesh.size() > 1
        return cls(model, strategy, folder=folder, config=config, groups=groups)

    @property
    def model(self) -> nn.Module:
        """The trained model, as the strategy has distributed it."""
        return self._strategy.model

    @classmethod
    def _load_model(cls, folder: str, config: RankConfig, divide: Divide | None) -> PreTrainedModel:
        model = load_policy(
            folder, config=config.train, divide=divide, float32_head=config.algorithm.float32_head, images=images_folder(config.run_dir))
        return let_replay(model, config.model)

    def snapshot(self, dtype: Dtype, *, name: str = WHOLE, merges: bool = False, copies: bool = True) -> ModelSnapshot:  # noqa: ARG002
        self._check([name])
        return ModelSnapshot(self._model, self._model_folder, self._whole_state(dtype, copies=copies), dtype)

    def _whole_state(self, dtype: Dtype, *, copies: bool = True) -> dict[str, Tensor]:
        """Return all weights on rank 0, such as "lm_head.weight" [V, H], and none on others; collective, for the inside of a region."""
        if self._exchange is not None:
            return self._exchange.state(dtype, [0])
        return full_state(self._model, dtype=dtype, keep=self.groups.rank == 0, copies=copies)

    def _begin_write(self, request: WriteRequest) -> Callable[[], Written]:
        """See `Trainer._begin_write`. Of a model in shards, each rank writes a part after the canary, unless rank 0 offers it."""
        return super()._begin_write(request) if self._parts is None else partial(self._write_parts, self._parts, request)

    def _write_parts(self, parts: PartWriter, request: WriteRequest) -> Written:
        if (written := parts.write(request)) is None:
            return super()._begin_write(request)()
        self._last = None
        return written

    def save(self, request: Folder) -> None:
        shards.save_state(request.folder, self._state(with_reference=self._refreshed), groups=self.groups, keeps=request.keeps)

    def load(self, request: Folder) -> LoadedStep:
        kept = self._reference is not None and shards.holds(request.folder, "reference")
        state = shards.load(request.folder, self._state(with_reference=kept), groups=self.groups)
        set_state_dict(self._strategy.model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if self._reference is not None and kept:
            self._reference.model.load_state_dict(state["reference"])
        elif self._refreshed:
            self._reference = self._load_reference()
        self._refreshed = kept
        self.step = state["step"]
        return LoadedStep(self.step)

    def _state(self, *, with_reference: bool) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._strategy.model, self._optimizer)
        state = {"model": model, "optimizer": optimizer, "step": self.step}
        if with_reference and self._reference is not None:
            state["reference"] = self._reference.model.state_dict()
        return state

    def _load_reference(self) -> Strategy:
        """Load the initial weights once more, in shards if the policy is."""
        return load_frozen(
            str(self._model_folder), config=self._config, groups=self.groups, float32_head=self._run.algorithm.float32_head,
            images=images_folder(self._run.run_dir))

    @contextmanager
    def _referring(self) -> Iterator[nn.Module]:
        assert self._reference is not None, "scores only where it is kept"
        with self._reference.scoring():
            yield self._reference.forward

    def _refresh_reference(self) -> None:
        assert self._reference is not None, "refreshed only where it is kept"
        self._reference.model.load_state_dict(self._strategy.model.state_dict())
        self._refreshed = True

    def _build_optimizer(self) -> torch.optim.AdamW:
        return build_optimizer(self._strategy.model, offloads=self._config.offload_optimizer)

    def _renew_optimizer(self) -> None:
        self._optimizer = self._build_optimizer()
        self._updates = 0

    def _check(self, names: Collection[str]) -> None:
        if others := set(names) - {WHOLE}:
            raise ConfigError(f"there is no adapter {min(others)[:120]!r} here; a whole model is trained")

    def _rows(self, batch: Batch, microbatches: Sequence[np.ndarray]) -> list[PackedRow]:
        rows = (row_of(batch, indices, share_prefix=self._config.share_prefix) for indices in microbatches)
        return [row if len(row) else dummy_row() for row in rows]

    def _own_rows(self, batch: Batch) -> list[PackedRow]:
        plan = plan_microbatches(
            batch, num_ranks=1, max_tokens=self._config.max_tokens_per_microbatch, share_prefix=self._config.share_prefix)
        rows = self._rows(batch, plan.microbatches[0])
        most = self.groups.sync.max_scalars("forward_rows", {"rows": len(rows)})["rows"]  # with FSDP and DDP, each is a collective
        return rows + [dummy_row()] * (int(most) - len(rows))

    def _using(self, batch: Batch, row: PackedRow, *, learn: bool, last: bool = True) -> AbstractContextManager:  # noqa: ARG002
        return self._strategy.accumulate(last=last) if learn else self._strategy.scoring()

    @contextmanager
    def _published(self, name: str, dtype: Dtype) -> Iterator[None]:  # noqa: ARG002
        with rounded(self._model, dtype), self._strategy.scoring():
            yield

    @property
    def _gradient_scale(self) -> int:
        """Number of ranks that DDP and FSDP average over, where the loss weights need a sum."""
        return self.groups.gradient_mesh.size()

    def _gradient_norms(self, names: Sequence[str]) -> dict[str, float]:
        self._norm = gradient_norm(self._strategy.model.parameters())
        return {name: self._norm.item() for name in names}

    def _step(self, name: str, params: AdamParams) -> None:  # noqa: ARG002
        if params.clip_norm:
            clip_gradients(self._strategy.model.parameters(), clip_norm=params.clip_norm, norm=self._norm)
        set_params(self._optimizer, params)
        self._optimizer.step()
        self._updates += 1

    def _weights(self) -> Iterable[Tensor]:
        return [parameter for parameter in self._strategy.model.parameters() if parameter.requires_grad]

    def _steps(self, name: str) -> int:  # noqa: ARG002
        return self._updates

    def _clear(self, names: Collection[str]) -> None:
        if names:
            self._optimizer.zero_grad(set_to_none=True)
