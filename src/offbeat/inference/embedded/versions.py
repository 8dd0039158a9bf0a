"""Weight versions an engine holds: the live one and those staged beside it. Owned by `engine.Engine`.

A version is bound to its folder while it is staged or live, and until a later one is live to no other.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import RefusedError
from offbeat.inference.embedded.forward import Forward
from offbeat.inference.embedded.receive import receive_weights
from offbeat.model.fingerprint import fingerprint
from offbeat.model.hf_io import read_safetensors
from offbeat.types import Version


@dataclass(frozen=True, eq=False)
class PendingSwitch:
    """A switch that was asked for and is not done."""

    version: Version
    started: float
    done: "Future[float]"


def read_weights(forward: Forward, folder: str, broadcast: str = "") -> Any:
    """A version's weights, ready for `Forward.install`. May run beside the engine's thread.

    Args:
        folder: where they are written.
        broadcast: where they are offered instead, `host:port`; then the folder is read only if the sender says so.

    Raises:
        ModelError: the folder, or the offer, does not hold this model's weights.
        EngineError: they were not received.
    """
    state = receive_weights(broadcast, device=forward.device) if broadcast else None
    return forward.prepare(dict(read_safetensors(folder)) if state is None else state)


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The fingerprint that the trainer's `named_bytes` of the same weights has."""
    return fingerprint((name, tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()) for name, tensor in tensors.items())


class VersionStore:
    """Folders of the live version and of those staged, and the prepared weights of the latter."""

    def __init__(self, *, live: Version, folder: str) -> None:
        self._live = live
        self._folders = {live: folder}
        self._staged: dict[Version, Any] = {}

    def has(self, version: Version, folder: str) -> bool:
        """Whether the version is staged or live.

        Raises:
            RefusedError: it is bound to another folder.
        """
        bound = self._folders.get(version, folder)
        if bound != folder:
            raise RefusedError(f"version {version} is {bound} and cannot become {folder}; a version is immutable, use a new one")
        return version == self._live or version in self._staged

    def add(self, version: Version, folder: str, prepared: Any) -> None:
        """Hold prepared weights; `has` allowed it."""
        self._folders[version] = folder
        self._staged[version] = prepared

    def check_staged(self, version: Version) -> None:
        """
        Raises:
            RefusedError: the version is not staged.
        """
        if version not in self._staged:
            raise RefusedError(f"version {version} is not staged; staged are {sorted(self._staged)} and {self._live} is live")

    def make_live(self, version: Version) -> Any:
        """Take a staged version's weights; older staged ones are dropped."""
        prepared = self._staged[version]
        self._live = version
        self._staged = {v: weights for v, weights in self._staged.items() if v > version}
        self._folders = {v: self._folders[v] for v in (version, *self._staged)}
        return prepared
