"""Published weights as vLLM's processes see them: files in a folder, or in memory where they were received. Used by `vllm_inside`.

Imports nothing of `offbeat`, which is not in vLLM's environment; two of its files, which need only numpy and torch, are loaded by their
paths.
"""

import importlib.util
import json
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from safetensors import safe_open
from safetensors.torch import save

_BUFFERS = ("e_score_correction_bias", "inv_freq", "masked_bias")
"""Suffixes of the names of tensors that transformers does not treat as parameters, so that the trainer's fingerprint omits them."""


class RefusedError(Exception):
    """The request is invalid."""


class MemoryFile:
    """A safetensors file in this process's memory, for its workers; it disappears with this object, or with the process.

    Attributes:
        path: path by which other processes of this user open it.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._descriptor = os.memfd_create("offbeat-weights")
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        with os.fdopen(self._descriptor, "wb", closefd=False) as file:
            file.write(save(tensors))

    def __del__(self) -> None:
        os.close(self._descriptor)


def receive(address: str) -> MemoryFile | None:
    """Receive the weights offered at `host:port`; None where they are to be read from the version's folder.

    Raises:
        RefusedError: Offbeat's own file is not where it should be.
    """
    tensors = _offbeat_module("sync", "broadcast").receive(address, device=torch.device("cpu"))
    return None if tensors is None else MemoryFile(tensors)


def files_of(folder: str) -> list[Path]:
    """Return the safetensors files of a folder, sorted."""
    return sorted(Path(folder).glob("*.safetensors"))


def check_weights(files: list[Path], name: str, model: str, *, tied: bool) -> None:
    """Check that a version's files fit the model.

    Raises:
        RefusedError: the files, of the version's folder `name`, do not hold weights of the same names and shapes as the model.
    """
    if not (own := read_shapes(files)):
        raise RefusedError(f"{name} holds no *.safetensors file that can be read here")
    wanted = read_shapes(files_of(model))  # empty for a model of the hub, whose weights are in a cache
    if tied:
        for shapes in (own, wanted):
            shapes.pop("lm_head.weight", None)
    for tensor in sorted(wanted.keys() | own.keys()) if wanted else ():
        if wanted.get(tensor) != own.get(tensor):
            there, here = own.get(tensor, "missing"), wanted.get(tensor, "missing")
            raise RefusedError(f"{name} is another model than {model}: {tensor} is {there} there, {here} here")


def read_shapes(files: list[Path]) -> dict[str, list[int]]:
    """Read the shape of every tensor in safetensors files from their headers.

    Raises:
        RefusedError: a file is not a complete safetensors file.
    """
    shapes: dict[str, list[int]] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(size, path.stat().st_size)))
            header.pop("__metadata__", None)
            if 8 + size + max(entry["data_offsets"][1] for entry in header.values()) != path.stat().st_size:
                raise ValueError("its end is missing")
            shapes |= {name: entry["shape"] for name, entry in header.items()}
        except (OSError, ValueError, KeyError, TypeError, struct.error) as exc:
            raise RefusedError(f"{path} is not a complete safetensors file: {exc}") from exc
    return shapes


def fingerprint_files(files: Iterable[str | Path], *, dtype: torch.dtype | None = None) -> str:
    """Compute `offbeat.model.fingerprint` of the tensors in safetensors files, converted to `dtype` if it is given.

    Raises:
        RefusedError: Offbeat's own file is not where it should be.
    """
    return _offbeat_module("model", "fingerprint").fingerprint((
        (name, tensor.to(dtype or tensor.dtype).contiguous().view(-1).view(torch.uint8).numpy())
        for name, tensor in read_files(files) if not name.endswith(_BUFFERS)))


def read_files(files: Iterable[str | Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with their names; the files are mapped, not copied."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def _offbeat_module(folder: str, name: str) -> ModuleType:
    """Load one of Offbeat's own files by its path.

    Raises:
        RefusedError: the file is not where it should be.
    """
    path, label = Path(__file__).parents[2] / folder / f"{name}.py", f"offbeat_{name}"
    if not path.exists():
        raise RefusedError(f"published weights need Offbeat's own {path}; put its folder engine/inside on PYTHONPATH, not a copy")
    if label not in sys.modules:
        spec = importlib.util.spec_from_file_location(label, path)
        assert spec is not None and spec.loader is not None, "it is a Python file"
        sys.modules[label] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[label])
    return sys.modules[label]
