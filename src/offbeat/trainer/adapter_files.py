"""Checkpoints of single adapters: weights, Adam's moments and step count in one safetensors file, independent of the bank they came from.

Written by rank 0 of an adapter engine and read by all ranks. A checkpoint appears complete or not at all, and nothing in it is unpickled.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offbeat.disk import discard, put_in_place
from offbeat.errors import StorageError
from offbeat.model.peft_io import Adapter

FILE = "adapter_state.safetensors"
_PARTS = ("weights", "exp_avg", "exp_avg_sq")
_KEY = re.compile(rf"(?P<part>{'|'.join(_PARTS)})\.(?P<module>.+)\.(?P<side>[AB])")


@dataclass(frozen=True, eq=False)
class AdapterState:
    """Everything needed to continue training an adapter: optimizer steps done, its weights, and Adam's moments in the same form."""

    step: int
    weights: Adapter
    exp_avg: Adapter
    exp_avg_sq: Adapter


def write_adapter_state(state: AdapterState, folder: Path) -> None:
    """Write a checkpoint in place of an existing one, which stays intact if it raises StorageError."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    tensors = {
        f"{name}.{module}.{side}": tensor
        for name in _PARTS for module, pair in getattr(state, name).pairs.items() for side, tensor in zip("AB", pair, strict=True)}
    about = {"step": str(state.step), "rank": str(state.weights.rank), "scaling": repr(state.weights.scaling)}
    try:
        part.mkdir(parents=True)
        save_file(tensors, part / FILE, metadata=about)
        put_in_place(part, folder)
    except (OSError, SafetensorError) as exc:
        raise StorageError(f"the adapter's checkpoint {folder} could not be written: {exc}; free space or choose another folder") from exc
    finally:
        discard(part)


def read_adapter_state(folder: Path) -> AdapterState:
    """Read a checkpoint; raises StorageError if there is none, or it is damaged."""
    pairs: dict[str, dict[str, dict[str, Tensor]]] = {name: {} for name in _PARTS}
    try:
        with safe_open(folder / FILE, framework="pt") as file:
            about: Mapping[str, str] = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118
                match = _KEY.fullmatch(key)
                if match is None:
                    raise ValueError(f"it holds {key!r}")
                pairs[match["part"]].setdefault(match["module"], {})[match["side"]] = file.get_tensor(key)
        rank, scaling = int(about["rank"]), float(about["scaling"])
        weights, exp_avg, exp_avg_sq = (
            Adapter(rank, scaling, {module: (sides["A"], sides["B"]) for module, sides in pairs[name].items()}) for name in _PARTS)
        _check_shapes(weights, exp_avg, exp_avg_sq)
        return AdapterState(int(about["step"]), weights, exp_avg, exp_avg_sq)
    except (OSError, SafetensorError, ValueError, KeyError) as exc:
        raise StorageError(f"{folder} is not a checkpoint of an adapter, or it is damaged: {exc}") from exc


def _check_shapes(*parts: Adapter) -> None:
    shapes = [{module: (a.shape, b.shape) for module, (a, b) in part.pairs.items()} for part in parts]
    rank = parts[0].rank
    if any(own != shapes[0] for own in shapes) or any(
            len(a) != 2 or len(b) != 2 or not a[0] == b[1] == rank for a, b in shapes[0].values()):
        raise ValueError(f"its weights and moments are not all A and B of rank {rank}")
