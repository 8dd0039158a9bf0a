"""The engine's side of `publishing.py`: a process that holds weights, and copies versions into them from wherever it is told.

Jobs: {"hold": specs} makes weights of these names, types and shapes; {"handle": ...}, {"file": path} and {"broadcast": address} copy a
version into them; {"do": "fingerprint"} answers with their fingerprint and sets them to zero.

usage: publishing_engine.py DEVICE
"""

import sys
from typing import Any

import torch
from handles import open_shared
from measure import answer_jobs, claim_stdout
from safetensors.torch import load_file
from torch import Tensor

from offbeat.engine.forward import fingerprint_tensors
from offbeat.sync.broadcast import Spec, receive
from offbeat.sync.platform import current_platform


class Engine:
    """Weights, and the trainer's memory once a handle of it has come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weights: dict[str, Tensor] = {}
        self._shared: tuple[list[Any], Tensor] | None = None

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Do a job."""
        match job:
            case {"hold": specs}:
                of = [Spec(name, dtype, tuple(shape)) for name, dtype, shape in specs]
                self._weights = {spec.name: torch.zeros(spec.shape, dtype=spec.torch_dtype, device=self._device) for spec in of}
            case {"handle": handle}:
                self._take(self._cut(self._opened(handle)))
            case {"file": path}:
                self._take(load_file(path, device=str(self._device)))
            case {"broadcast": address}:
                received = receive(address, device=self._device)
                assert received is not None, "the trainer has no folder to offer instead"
                self._take(received)
            case {"do": "fingerprint"}:
                told = fingerprint_tensors(self._weights)
                torch._foreach_zero_(list(self._weights.values()))
                return {"fingerprint": told}
        return {}

    def _take(self, version: dict[str, Tensor]) -> None:
        torch._foreach_copy_(list(self._weights.values()), [version[name] for name in self._weights])
        current_platform.synchronize()

    def _opened(self, handle: list[Any]) -> Tensor:
        """Return the trainer's memory; a handle is opened once, since CUDA counts how often that happens."""
        if self._shared is None or self._shared[0] != handle:
            self._shared = handle, open_shared(handle, self._device)
        return self._shared[1]

    def _cut(self, buffer: Tensor) -> dict[str, Tensor]:
        parts = buffer.split([tensor.nbytes for tensor in self._weights.values()])
        return {
            name: part.view(tensor.dtype).view(tensor.shape) for part, (name, tensor) in zip(parts, self._weights.items(), strict=True)}


if __name__ == "__main__":
    answer_jobs(claim_stdout(), Engine(torch.device(sys.argv[1])).answer)
