"""Distribution of a whole model in training over the ranks: on one, replicated (DDP), or in shards (FSDP2).

`ModelTrainer` calls one `Strategy` and has no branch by kind. All methods that say "collective" must be called by every rank. In mixed
precision FSDP2 casts a layer's float32 weights to bfloat16 when the layer runs; the other two compute under autocast.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from offbeat.config.train import Precision
from offbeat.errors import ModelError
from offbeat.model.blocks import compile_layers, language_layers
from offbeat.model.context import ContextGroup
from offbeat.model.divided_read import Divide, WholeOnlyError
from offbeat.model.expert_dispatch import check_dealt, deal_experts, dealt_modules
from offbeat.model.logprobs import packs_rows
from offbeat.model.parallel import check_slices, divide, slice_layers
from offbeat.model.rows import spread_rows
from offbeat.model.values import ValueHead
from offbeat.sync.mesh import ProcessGroups
from offbeat.sync.platform import current_platform

_log = logging.getLogger(__name__)


class Strategy(Protocol):
    """A model distributed over the ranks. Calls of `forward` are forward passes, and collective."""

    forward: nn.Module

    @property
    def model(self) -> nn.Module:
        """The module that is trained; the optimizer sees its parameters, under their names in a checkpoint."""
        ...

    def accumulate(self, *, last: bool) -> AbstractContextManager:
        """Return the context of one forward and backward pass; collective. Gradients are averaged over ranks by the time of the `last`."""
        ...

    def scoring(self) -> AbstractContextManager:
        """Return the context of forward passes without gradient."""
        ...


class Alone:
    """One rank holds the whole model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = self.forward = model.to(current_platform.device)

    def accumulate(self, *, last: bool) -> AbstractContextManager:  # noqa: ARG002
        return nullcontext()

    def scoring(self) -> AbstractContextManager:
        return torch.no_grad()


class Replicated:
    """Every rank holds the whole model; gradients are averaged by DDP."""

    def __init__(self, model: nn.Module, groups: ProcessGroups) -> None:
        self.model = model.to(current_platform.device)
        # Buffers are constants of the architecture, equal on all ranks; broadcasting them would make every forward a collective.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch call the argument otherwise
            self._ddp = DistributedDataParallel(
                self.model, process_group=groups.gradient_mesh.get_group(), broadcast_buffers=False, gradient_as_bucket_view=True)
        self.forward: nn.Module = self._ddp

    def accumulate(self, *, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self._ddp.no_sync()

    def scoring(self) -> AbstractContextManager:
        return torch.no_grad()


class Sharded:
    """Every rank holds a shard of each parameter; layers are gathered when they run (FSDP2). There may be replicas of all shards.

    Gradients are summed over the ranks after every micro-batch, so that none ever holds more than a layer's and its own shard of all.
    """

    def __init__(self, model: PreTrainedModel, groups: ProcessGroups, precision: Precision = "float32") -> None:
        # Inputs are not cast, since that would copy the plan of attention; from the embeddings on they are of the weights' format.
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        policy = mixed if precision == "bf16_mixed" else MixedPrecisionPolicy()
        for experts in dealt_modules(model):
            fully_shard(experts, mesh=groups.expert_shard_mesh, mp_policy=policy)
        for layer in language_layers(model):  # a tower's run for rows with images alone, and not on all ranks at the same time
            fully_shard(layer, mesh=groups.shard_mesh, mp_policy=policy)
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        if head is not None and head.weight is not embeddings.weight:  # a tied one stays in the root's unit, which both belong to
            fully_shard(embeddings, mesh=groups.shard_mesh, mp_policy=policy)
            fully_shard(head, mesh=groups.shard_mesh, mp_policy=MixedPrecisionPolicy() if isinstance(head, ValueHead) else policy)
        self._root = fully_shard(model, mesh=groups.shard_mesh, mp_policy=policy)
        self.model: nn.Module = model
        self.forward: nn.Module = model

    def accumulate(self, *, last: bool) -> AbstractContextManager:  # noqa: ARG002
        return nullcontext()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        with torch.no_grad():
            yield
        # Without a backward pass the root keeps its gathered parameters; an optimizer created now would hold those instead of the shards.
        self._root.reshard()


def load(
    read: Callable[[Divide | None], PreTrainedModel], *, groups: ProcessGroups, precision: Precision = "float32", trained: bool = True,
    compiles: bool = False,
) -> tuple[PreTrainedModel, Strategy]:
    """Load a model and distribute it over the ranks; collective. Raises as `choose`.

    Args:
        read: loads the model; with an argument, as `offbeat.model.load.load_causal_lm` does with `divide`. Where ranks hold parts of the
            model, each then reads no more than its own, unless `read` raises `WholeOnlyError`.
        compiles: whether layers are compiled, once the model has its final form on its device.
    """
    loaded = None
    if groups.shape.divides:
        try:
            loaded = _load_parts(read, groups, precision=precision)
        except WholeOnlyError as exc:
            _log.warning("every rank loads the whole model before it keeps its part, since it %s", exc)
    if loaded is None:
        model = read(None)
        loaded = model, choose(model, groups=groups, precision=precision, trained=trained)
    if compiles:
        compile_layers(loaded[0])
    return loaded


def _load_parts(
    read: Callable[[Divide | None], PreTrainedModel], groups: ProcessGroups, *, precision: Precision,
) -> tuple[PreTrainedModel, Strategy]:
    """Distribute a model before its weights are read. Raises as `read`."""
    shape, found = groups.shape, list[Sharded]()

    def divide(empty: PreTrainedModel) -> None:
        if shape.tp > 1:
            slice_layers(empty, groups.mesh["tp"], experts=shape.ep > 1)
        if groups.expert_mesh is not None:
            deal_experts(empty, groups.expert_mesh["ep"])
        if _in_shards(groups):
            found.append(Sharded(empty, groups, precision))

    model = read(divide)
    if found:
        _check_packs(model, groups)
    strategy = found[0] if found else Alone(model)
    with strategy.scoring():  # at its end, it drops the remains of the forward passes that try the model
        if shape.tp > 1:
            mixed = bool(found) and precision == "bf16_mixed"
            check_slices(model, groups.mesh["tp"], computes=torch.bfloat16 if mixed else None)
        _check_experts(model, groups, precision=precision)
        _spread(strategy, groups)
    return model, strategy


def choose(model: PreTrainedModel, *, groups: ProcessGroups, precision: Precision = "float32", trained: bool = True) -> Strategy:
    """Distribute `model` over the ranks as their mesh says; collective. Replicas that are not `trained` are not synchronised.

    Raises:
        ModelError: its sequences run one by one, so ranks need different numbers of forward passes, but with FSDP each is a collective;
            or it cannot be divided over a tensor group, see `divide`, its experts over ranks, see `deal_experts`, or its rows over a
            context group, see `spread_rows`.
    """
    strategy = _distribute(model, groups, precision=precision, trained=trained)
    with strategy.scoring():
        _check_experts(model, groups, precision=precision)
        _spread(strategy, groups)
    return strategy


def _check_experts(model: PreTrainedModel, groups: ProcessGroups, *, precision: Precision) -> None:
    if groups.expert_mesh is not None:
        check_dealt(model, groups.expert_mesh["ep"], computes=torch.bfloat16 if precision == "bf16_mixed" else None)


def _spread(strategy: Strategy, groups: ProcessGroups) -> None:
    if groups.shape.cp > 1:
        spread_rows(strategy.forward, ContextGroup(groups.mesh.get_group("cp")))


def _distribute(model: PreTrainedModel, groups: ProcessGroups, *, precision: Precision, trained: bool) -> Strategy:
    shape = groups.shape
    if shape.tp > 1:
        divide(model, groups.mesh["tp"], experts=shape.ep > 1)
    if groups.expert_mesh is not None:
        deal_experts(model, groups.expert_mesh["ep"])
    shares = groups.gradient_mesh.size() > 1
    if _in_shards(groups):
        _check_packs(model, groups)
        return Sharded(model, groups, precision)
    return Replicated(model, groups) if trained and shares else Alone(model)


def _in_shards(groups: ProcessGroups) -> bool:
    """Whether FSDP2 distributes a model that ranks divide.

    DDP knows nothing of divided models. Frozen models are distributed alike, since a reference is given the policy's weights.
    """
    shape = groups.shape
    return shape.shard > 1 or (shape.divides and groups.gradient_mesh.size() > 1)


def _check_packs(model: PreTrainedModel, groups: ProcessGroups) -> None:
    if not packs_rows(model):
        name = next(name for name in ("shard", "tp", "ep") if getattr(groups.shape, name) > 1)
        raise ModelError(f"{type(model).__name__.removeprefix('FSDP')} cannot pack its rows, which train.parallel.{name} > 1 needs; use 1")


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be in shards, such as [V, H] from [V / R, H]; collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
