"""Host waits, counted on tensors without values: what on a GPU would stop the host until the device has done all that it was given."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offbeat

DEVICE = torch.device("meta")
"""In the place of an accelerator: its tensors have no values, so an operation whose result's shape depends on them raises."""

_ATEN = torch.ops.aten
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_INDEXES = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default)
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default)
_SOURCE = str(Path(offbeat.__file__).parent)


class HostWaits(TorchDispatchMode):
    """Collects the operations that wait, as `found`: those that read values of a tensor, and copies that block between host and device.

    Attributes:
        found: each with its place, such as "losses/pairs.py:52 aten.nonzero.default".
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func.namespace == "aten":  # where operations made of others arrive whole
            with self:
                if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(_is_away(leaf) for leaf in given) and self._reads(func, given):
            self.note(str(func))
        result = self.run(func, args, kwargs)
        blocks = not (kwargs.get("non_blocking") or (func is _ATEN.copy_.default and len(args) > 2 and args[2]))
        away = {_is_away(leaf) for leaf in (*given, result) if isinstance(leaf, Tensor) and leaf.dim()}
        if func in _COPIES and len(away) > 1 and blocks:
            self.note(f"{func} {tuple(given[0].shape)}")
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation."""
        return func(*args, **kwargs)

    def note(self, operation: str) -> None:
        """Add an operation that waits, with the innermost line of Offbeat or of transformers that led to it."""
        self.found.append(f"{_place(sys._getframe(1))} {operation}")

    def _reads(self, func: Any, given: list[Tensor]) -> bool:
        if func in _INDEXES:  # a mask has as many indices as it has true values; indices of the host are copied first
            return any(leaf.dtype in (torch.bool, torch.uint8) or (leaf.dim() and not _is_away(leaf)) for leaf in _indices(func, given))
        return any(tag in func.tags for tag in _READS)


def _is_away(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _indices(func: Any, given: list[Tensor]) -> list[Tensor]:
    return given[1:] if func is _ATEN.index.Tensor else given[1:-1]


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_SOURCE):
            return f"{path.removeprefix(_SOURCE)[1:]}:{frame.f_lineno}"
        if "/transformers/" in path:
            return f"transformers/{path.rpartition('/transformers/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
