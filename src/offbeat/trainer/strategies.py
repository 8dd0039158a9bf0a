"""How a whole model in training is distributed over the ranks: on one, replicated (DDP), or in shards (FSDP2).

`ModelTrainer` talks to one `Strategy` and has no branch on which. All methods that say "collective" must be called by every rank.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from offbeat.errors import ModelError
from offbeat.model.logprobs import packs_rows
from offbeat.sync.mesh import ProcessGroups
from offbeat.sync.platform import current_platform


class Strategy(Protocol):
    """A model distributed over the ranks.

    Attributes:
        forward: called for a forward pass; collective.
    """

    forward: nn.Module

    @property
    def model(self) -> nn.Module:
        """The module that is trained; the optimizer sees its parameters, under their names in a checkpoint."""
        ...

    def accumulate(self, *, last: bool) -> AbstractContextManager:
        """Return the context of one forward and backward pass; collective if `last`: only then gradients are averaged over ranks."""
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
            self._ddp = DistributedDataParallel(self.model, process_group=groups.mesh.get_group("dp"), broadcast_buffers=False)
        self.forward: nn.Module = self._ddp

    def accumulate(self, *, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self._ddp.no_sync()

    def scoring(self) -> AbstractContextManager:
        return torch.no_grad()


class Sharded:
    """Every rank holds a shard of each parameter; layers are gathered when they run (FSDP2)."""

    def __init__(self, model: PreTrainedModel, groups: ProcessGroups) -> None:
        layer_types = set(model._no_split_modules or ())
        for module in model.modules():
            if type(module).__name__ in layer_types:
                fully_shard(module, mesh=groups.mesh)
        self._root = fully_shard(model, mesh=groups.mesh)
        self.model: nn.Module = model
        self.forward: nn.Module = model

    def accumulate(self, *, last: bool) -> AbstractContextManager:
        self._root.set_requires_gradient_sync(last)
        return nullcontext()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        with torch.no_grad():
            yield
        # Without a backward pass the root keeps its gathered parameters; an optimizer created now would hold those instead of the shards.
        self._root.reshard()


def choose(name: Literal["ddp", "fsdp"], model: PreTrainedModel, *, groups: ProcessGroups, trained: bool = True) -> Strategy:
    """Distribute `model` over the ranks; collective. "ddp" is the bare model on a single rank, and where it is not `trained`.

    Raises:
        ModelError: its sequences run one by one, so ranks need different numbers of forward passes, but with FSDP each is a collective.
    """
    if name == "fsdp" and not packs_rows(model):
        raise ModelError(f'{type(model).__name__} cannot pack its rows, which train.strategy = "fsdp" needs; use "ddp"')
    if name == "fsdp":
        return Sharded(model, groups)
    return Replicated(model, groups) if trained and groups.world > 1 else Alone(model)


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be in shards; collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
