"""Divides a model before its weights are read, so that a rank reads its own parts of them and nothing else.

Called by `load_causal_lm`. Transformers builds a model without weights, and reads into each DTensor the slice that this rank holds. A part
read that way equals that part of the whole model to the bit; where that is not certain, `WholeOnlyError` says so, and the caller reads the
whole model instead. All ranks come to the same conclusion, since it depends on the model and its checkpoint alone.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
from transformers.distributed import DistributedConfig

from offbeat.model.norm import use_fast_norms
from offbeat.sync.platform import current_platform

Divide = Callable[[PreTrainedModel], None]
"""Makes DTensors of a model's parameters, in place, while these hold nothing."""

GiveHead = Callable[[PreTrainedModel], None]
"""Replaces a model's output head by one that no checkpoint holds, with weights of its own."""


class WholeOnlyError(Exception):
    """A model must be loaded whole before it is divided; the text says why, as the end of a sentence about it."""


class DividedRead:
    """One reading of a model in parts."""

    def __init__(self, divide: Divide, give_head: GiveHead | None = None) -> None:
        """`give_head` is called before `divide`, which sees the new head; the checkpoint's is not read then."""
        self._divide = divide
        self._give_head = give_head
        self._head: nn.Module | None = None
        self._tied: dict[str, str] = {}
        self._ignored: Any = None
        self._shares_head = False

    @contextmanager
    def hooked(self) -> Iterator[dict[str, Any]]:
        """Let transformers call `divide` in place of its own distribution over a mesh; yields keywords for it."""

        def skip_placing(_cls: type, config: DistributedConfig, device_map: object = None) -> tuple[DistributedConfig, object, _NoMesh]:  # noqa: ARG001
            return config, torch.device(current_platform.device), _NoMesh()

        def distribute(_cls: type, model: PreTrainedModel, *_: object) -> PreTrainedModel:
            self._distribute(model)
            return model

        hooks = {"prepare_distribute_model": skip_placing, "maybe_distribute_model": distribute}
        for name, hook in hooks.items():
            setattr(PreTrainedModel, name, classmethod(hook))
        try:
            yield {"distributed_config": DistributedConfig()}
        finally:
            for name in hooks:
                delattr(PreTrainedModel, name)

    def complete(self, model: PreTrainedModel, wrong: list[str]) -> None:
        """Complete a model whose weights have been read, but for `wrong`, the names of those that were not found.

        Raises:
            WholeOnlyError: it is another model than the one that was divided, or could be found without division.
        """
        if self._head is not None:
            if wrong:  # such as embeddings that a checkpoint holds under the name of the head only
                raise WholeOnlyError(f"lacks {wrong[0]!r} beside the head, which is replaced")
            model.set_output_embeddings(self._head)
            model.all_tied_weights_keys = self._tied
            model._keys_to_ignore_on_load_unexpected = self._ignored
        elif _shares_head(model) != self._shares_head:
            raise WholeOnlyError("has a head and embeddings of different weights, against its config.json")

    def _distribute(self, model: PreTrainedModel) -> None:
        model.tie_weights()  # transformers ties them once they are loaded, too late for FSDP2, which has to know
        if self._give_head is not None:
            self._give_head(model)
        self._shares_head = _shares_head(model)
        use_fast_norms(model)
        conversions = get_model_conversion_mapping(model)  # which depend on names of classes, and FSDP2 changes those
        self._divide(model)
        _check_readable(model, [each for each in conversions if isinstance(each, WeightConverter)])
        if self._give_head is not None:
            self._hide_head(model)

    def _hide_head(self, model: PreTrainedModel) -> None:
        """Take the head out, until the weights have been read, so that transformers looks for none."""
        self._head, self._tied = model.get_output_embeddings(), model.all_tied_weights_keys
        self._ignored = model._keys_to_ignore_on_load_unexpected
        name = next(name for name, module in model.named_modules() if module is self._head)
        model.all_tied_weights_keys = {
            target: source for target, source in self._tied.items() if not f"{target} {source}".startswith(f"{name}.")}
        model._keys_to_ignore_on_load_unexpected = {*(self._ignored or ()), rf"^{re.escape(name)}\."}
        model.set_output_embeddings(nn.Module())


class _NoMesh:
    """Stands in for the mesh that transformers expects."""

    def get_mesh(self, _dims: object) -> None:
        """Return none: parameters know theirs."""


def _shares_head(model: PreTrainedModel) -> bool:
    head: Any = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _check_readable(model: PreTrainedModel, converters: Iterable[WeightConverter]) -> None:
    """Check that each part that transformers reads equals that part of the whole weight. Raises WholeOnlyError if it is not certain.

    It slices the tensors of a checkpoint, then converts the slices, for example by stacking experts. The result is the same if no
    dimension that is sliced is rearranged, and no part is empty.
    """
    parts = {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    converted: set[str] = set()
    for converter in converters:
        if others := [pattern for pattern in converter.target_patterns if not re.fullmatch(r"[\w.]+", pattern)]:
            raise WholeOnlyError(f"is converted while it is read, to names such as {others[0]!r}")
        targets = {name for name in parts if any(pattern in name for pattern in converter.target_patterns)}
        for name in sorted(targets):
            if other := next((each for each in converter.operations if not _commutes(each, parts[name])), None):
                raise WholeOnlyError(f"has {name!r} converted by {type(other).__name__} while it is read")
        converted |= targets
    for name, part in parts.items():
        for dim in range(part.ndim):
            pieces, cuts = _pieces(part, dim)
            if 0 in pieces and (cuts > 1 or name in converted):
                raise WholeOnlyError(f"has {name!r} of {part.shape[dim]} rows, fewer than there are ranks to divide them")


def _commutes(operation: ConversionOps, part: DTensor) -> bool:
    """Whether an operation on slices gives the slice of its result, as concatenation along another dimension does."""
    if isinstance(operation, MergeModulelist):
        return operation.dim == 0
    return isinstance(operation, Concatenate) and all(operation.dim % part.ndim != dim for dim, _ in _cuts(part))


def _pieces(part: DTensor, dim: int) -> tuple[list[int], int]:
    """Return the sizes of all ranks' pieces along a dimension, and the number of cuts: first by the mesh's last dimension."""
    pieces, sizes = [part.shape[dim]], [size for cut, size in _cuts(part) if cut == dim]
    for count in reversed(sizes):
        pieces = [min(each, max(0, size - start * each)) for size in pieces for each in [-(-size // count)] for start in range(count)]
    return pieces, len(sizes)


def _cuts(part: DTensor) -> list[tuple[int, int]]:
    """Return (dimension, number of parts) for each of the mesh's dimensions that cuts a tensor, such as [(0, 4)] for rows over 4 ranks."""
    mesh = part.device_mesh
    return [(each.dim % part.ndim, mesh.size(axis)) for axis, each in enumerate(part.placements) if hasattr(each, "dim")]  # pyright: ignore[reportAttributeAccessIssue]
