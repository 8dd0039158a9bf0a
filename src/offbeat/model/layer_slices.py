"""The part of a linear layer that a rank computes where a tensor group computes it together; for adapters beside such a layer.

`parallel` notes how it has divided a model, and `lora` asks about each layer that it adapts. With x A B beside a layer, a rank multiplies
by the rows of A for the inputs that it has, and by the columns of B for its outputs. Where it has a slice of the inputs, x A is one part of
a sum over the group, and where it has a slice of the outputs, so is the gradient of x A. Only the inputs of the next step, B or x, take
these sums: the gradients of A and B are computed from the parts, so that they add up over all ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from offbeat.errors import ModelError

_ALL = slice(None)
_WHOLE_STYLES = frozenset({"colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"})
"""Transformers' names for layers whose inputs and outputs are whole on every rank, whatever it has of the weight."""


@dataclass(frozen=True, eq=False)
class LayerSlice:
    """A rank's part of a linear layer; without a group the whole layer.

    Attributes:
        inputs, outputs: features of the layer's input and output that are on this rank.
        group: ranks that compute the layer together.
        counts: whether this rank's part belongs in the sum of gradients: where each has the whole gradient, the first rank's alone does.
    """

    inputs: slice
    outputs: slice
    group: dist.ProcessGroup | None = None
    counts: bool = True

    def sum_inputs(self, narrow: Tensor) -> Tensor:
        """Return x A [T, R] of all inputs from x A of the inputs here, [T, R]; collective where these are a slice."""
        return narrow if self.inputs == _ALL else self._summed(narrow)

    def sum_outputs(self, grad_narrow: Tensor) -> Tensor:
        """Return the gradient of x A [T, R] through all outputs from the gradient through the outputs here; collective for a slice."""
        return grad_narrow if self.outputs == _ALL else self._summed(grad_narrow)

    def _summed(self, part: Tensor) -> Tensor:
        summed = part.clone()
        dist.all_reduce(summed, group=self.group)
        return summed


WHOLE_LAYER = LayerSlice(_ALL, _ALL)

_divided: "WeakKeyDictionary[nn.Module, tuple[DeviceMesh, Mapping[str, str]]]" = WeakKeyDictionary()
"""Meshes of one dimension, and transformers' styles of division, such as "colwise", by the modules' names."""


def note_division(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str]) -> None:
    _divided[model] = mesh, dict(styles)


def is_divided(model: nn.Module) -> bool:
    """Whether a tensor group computes a model's layers together."""
    return model in _divided


def slice_of(model: nn.Module, name: str) -> LayerSlice:
    """Return this rank's slice of a model's linear layer. Raises ModelError if its parts do not add up as in other layers."""
    if not is_divided(model):
        return WHOLE_LAYER
    (mesh, styles), layer = _divided[model], model.get_submodule(name)
    assert isinstance(layer, nn.Linear), f"{name} is no linear layer"
    style, group = styles.get(name), mesh.get_group()
    if style == "colwise":
        return LayerSlice(_ALL, _part(layer.out_features, mesh), group)
    if style == "rowwise":
        return LayerSlice(_part(layer.in_features, mesh), _ALL, group)
    if style is None or style in _WHOLE_STYLES:
        return LayerSlice(_ALL, _ALL, group, counts=mesh.get_local_rank() == 0)
    raise ModelError(
        f"model.lora.targets names {name!r}, which transformers divides over ranks as {style!r}, where adapters cannot follow; leave it out"
        " of the targets, or set train.parallel.tp to 1")


def _part(num: int, mesh: DeviceMesh) -> slice:
    """Return this rank's part of `num` features, as a DTensor divides them."""
    each = -(-num // mesh.size())
    start = min(each * mesh.get_local_rank(), num)
    return slice(start, min(start + each, num))
