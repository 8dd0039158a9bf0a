"""The weights of a model in shards, dealt out to the ranks that write or send them, so that no other gathers any.

Used by `ModelTrainer` where the model is distributed over several ranks that hold parts of it.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from offbeat.model.checkpoint_names import published_together
from offbeat.sync.broadcast import Spec
from offbeat.sync.mesh import ProcessGroups
from offbeat.sync.shard_exchange import Holdings, ShardExchange
from offbeat.trainer.messages import Dtype
from offbeat.trainer.state import owned, target_dtype


class WeightExchange:
    """Deals a model's weights out, by plans that it makes once."""

    def __init__(self, model: PreTrainedModel, groups: ProcessGroups) -> None:
        self._model = model
        self._groups = groups
        self._holdings: list[Holdings] = []
        self._exchanges: dict[tuple[Dtype, tuple[int, ...]], ShardExchange] = {}

    @classmethod
    def of(cls, model: PreTrainedModel, groups: ProcessGroups) -> Self | None:
        """Return an exchange for a model that is in shards; None if this rank has all of it."""
        in_shards = groups.world > 1 and any(isinstance(parameter, DTensor) for parameter in model.parameters())
        return cls(model, groups) if in_shards else None

    def num_bytes(self, dtype: Dtype) -> int:
        """Return the size of all weights in this number format; not collective."""
        return sum(tensor.numel() * target_dtype(tensor, dtype).itemsize for _, tensor in owned(self._model))

    def plan(self, dtype: Dtype, owners: Sequence[int]) -> ShardExchange:
        """Return the exchange of all ranks; collective where the plan is new, and every rank asks for the same."""
        key = dtype, tuple(owners)
        if key not in self._exchanges:
            tensors = dict(owned(self._model))
            self._holdings = self._holdings or self._groups.sync.gather("publish_layout", Holdings.of(tensors))
            specs = [
                Spec(name, str(target_dtype(tensor, dtype)).removeprefix("torch."), tuple(tensor.shape))
                for name, tensor in tensors.items()]
            self._exchanges[key] = ShardExchange.plan(
                self._holdings, specs, together=published_together(self._model, tensors), owners=owners)
        return self._exchanges[key]

    @torch.no_grad()
    def state(self, dtype: Dtype, owners: Sequence[int]) -> dict[str, Tensor]:
        """Return this rank's dealt weights, as in `full_state`, such as "lm_head.weight" [V, H]; collective, for the inside of a region."""
        tensors = {name: tensor.detach() for name, tensor in owned(self._model)}
        return self.plan(dtype, owners).run(tensors, rank=self._groups.rank)
