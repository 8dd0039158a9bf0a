"""Published weights as vLLM's processes see them: files in a folder, or in memory where they were received. Used by `vllm_inside`.

Imports nothing of `offbeat`, which is not in vLLM's environment; a few of its files, which need only what vLLM has, too, are loaded by
their paths.
"""

import importlib
import importlib.util
import json
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from safetensors import safe_open

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL"}
"""Names of number formats in safetensors files."""
_BUFFERS = ("e_score_correction_bias", "inv_freq", "masked_bias")
"""Suffixes of the names of tensors that transformers does not treat as parameters, so that the trainer's fingerprint omits them."""


class RefusedError(Exception):
    """The request is invalid."""


class MemoryFile:
    """A safetensors file in this process's memory, for its workers; it disappears with this object, or with the process.

    Other processes of this user open it by `path`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write CPU tensors by name, such as [V, H], and take each out of `tensors` once written, so that memory never holds all of them
        twice.
        """
        self._descriptor = os.memfd_create("offbeat-weights")
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that each lies where its numbers are aligned
        header, end = {}, 0
        for name in names:
            start, end = end, end + tensors[name].nbytes
            header[name] = {"dtype": _CODES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with os.fdopen(self._descriptor, "wb", closefd=False) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                file.write(_bytes_of(tensors.pop(name)))

    def __del__(self) -> None:
        os.close(self._descriptor)


def files_of(folder: str) -> list[Path]:
    """Return the safetensors files of a folder, sorted."""
    return sorted(Path(folder).glob("*.safetensors"))


def check_weights(files: list[Path], name: str, model: str, *, tied: bool) -> None:
    """Check that a version's files fit the model.

    Raises RefusedError if the files, of the version's folder `name`, do not hold weights of the same names and shapes as the model.
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
    """Read the shape of every tensor in safetensors files from their headers. Raises RefusedError if a file is not complete."""
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

    Raises as `offbeat_module`.
    """
    return fingerprint_tensors((name, tensor.to(dtype or tensor.dtype)) for name, tensor in read_files(files))


def fingerprint_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Compute `offbeat.model.fingerprint` of CPU tensors of any shape with their names. Raises as `offbeat_module`."""
    return offbeat_module("model", "fingerprint").fingerprint(
        (name, _bytes_of(tensor)) for name, tensor in tensors if not name.endswith(_BUFFERS))


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def read_files(files: Iterable[str | Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with their names, such as ("lm_head.weight", [V, H]); the files are mapped, not copied."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def offbeat_module(folder: str, name: str) -> ModuleType:
    """Load one of Offbeat's own files by its path. Raises RefusedError if the file is not where it should be."""
    path, label = Path(__file__).parents[2] / folder / f"{name}.py", f"offbeat_{name}"
    if not path.exists():
        raise RefusedError(f"published weights need Offbeat's own {path}; put its folder engine/inside on PYTHONPATH, not a copy")
    if label not in sys.modules:
        spec = importlib.util.spec_from_file_location(label, path)
        assert spec is not None and spec.loader is not None, "it is a Python file"
        sys.modules[label] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[label])
    return sys.modules[label]


def import_offbeat(name: str) -> ModuleType:
    """Import a module of Offbeat, such as "data.image_store", that needs others of it; none of those that its package imports."""
    if "offbeat" not in sys.modules:
        sys.modules["offbeat"] = package = ModuleType("offbeat")
        package.__path__ = [str(Path(__file__).parents[2])]
    return importlib.import_module(f"offbeat.{name}")
