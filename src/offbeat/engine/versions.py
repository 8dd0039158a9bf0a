"""The weight versions that an engine holds: the live one and those staged beside it. Owned by `engine.Engine`.

A version is identified by its folder and fingerprint, not by its number alone: a resumed run publishes a number again with other weights.
They replace those staged under that number, and are switched to even where that number is live.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.engine.forward import Forward
from offbeat.errors import EngineError, ModelError, RefusedError, first_line
from offbeat.model.changes import ChangesError, apply_changes
from offbeat.model.changes_io import read_weights
from offbeat.sync.broadcast import Held, receive
from offbeat.types import Version


@dataclass(frozen=True)
class VersionSource:
    """Identity of a version's weights: the folder where they were written, and the fingerprint that their publisher stated, if any."""

    folder: str
    fingerprint: str = ""


@dataclass(frozen=True, eq=False)
class PendingSwitch:
    version: Version
    started: float
    done: "Future[float]"


def read_version(forward: Forward, folder: str, broadcast: str = "", *, live: str = "") -> Any:
    """Read a version's weights into the form that `Forward.install` takes. May run beside the engine's thread.

    The folder holds the weights or their changes. With `broadcast`, a `host:port`, they are offered there instead, and the folder is read
    only if the sender says so. The weights in use, whose folder is `live`, are not read or received again where they are enough.

    Raises:
        ModelError: the folder, or the broadcast, does not hold this model's weights.
        EngineError: the weights were not received.
    """
    if live and not broadcast and Path(folder) == Path(live):
        return forward.installed()
    live = live if forward.takes_changes else ""

    def held(base: Path) -> Mapping[str, Tensor] | None:
        return forward.tensors() if str(base) == live else None

    state = receive_weights(broadcast, device=forward.device, live=live, tensors=forward.tensors) if broadcast else None
    if state is None:
        try:
            state = read_weights(folder, held=held)
        except ModelError:  # the weights in use may differ from the published ones; if the folder is at fault, this fails again
            state = read_weights(folder)
    return forward.prepare(state)


class VersionStore:
    """The live version and the staged ones, with the prepared weights of the staged ones."""

    def __init__(self, *, live: Version, folder: str) -> None:
        self._live = live
        self._source: VersionSource | None = VersionSource(folder)
        self._staged: dict[Version, tuple[VersionSource, Any]] = {}

    def has(self, version: Version, source: VersionSource) -> bool:
        """Whether exactly these weights are staged, or live with nothing staged in their place."""
        if version in self._staged:
            return self._staged[version][0] == source
        return version == self._live and self._source == source

    def add(self, version: Version, source: VersionSource, prepared: Any) -> None:
        """Hold prepared weights, replacing others with that number."""
        self._staged[version] = source, prepared

    def base_for(self, folder: str) -> str:
        """Return the folder of the live weights, from which those of another folder may be made; empty if there is none.

        A version's own folder may hold other weights by now, so it is read again. That from which the engine was started may be taken for
        what it holds until a first version has been published.
        """
        live = "" if self._source is None else self._source.folder
        return "" if live and self._live >= 0 and Path(folder) == Path(live) else live

    def forget_live(self) -> None:
        """Note that the live version's weights are gone: to be served again, it has to be staged."""
        self._source = None

    @property
    def holds_live(self) -> bool:
        return self._source is not None

    def is_staged(self, version: Version) -> bool:
        return version in self._staged

    def check_staged(self, version: Version) -> None:
        """Raise RefusedError if a version is not staged."""
        if version not in self._staged:
            raise RefusedError(f"version {version} is not staged; staged are {sorted(self._staged)} and {self._live} is live")

    def make_live(self, version: Version) -> Any:
        """Take a staged version's weights. All others are dropped: a run stages one at a time, so the rest were abandoned."""
        self._source, prepared = self._staged[version]
        self._live, self._staged = version, {}
        return prepared


def receive_weights(
    address: str, *, device: torch.device, live: str = "", tensors: Callable[[], Mapping[str, Tensor]] = dict,
) -> dict[str, Tensor] | None:
    """Receive weights offered at `address`; see `offbeat.sync.broadcast.receive`. Raises EngineError if they were not received.

    Args:
        live: folder of the weights in use, to which changes are enough; empty if whole weights are wanted.
        tensors: returns the weights in use by their published names, such as "lm_head.weight" [V, H]; they are not modified.
    """
    def change(changes: dict[str, Tensor]) -> dict[str, Tensor] | None:
        state = dict(tensors())
        try:
            apply_changes(state, changes)
        except ChangesError:  # the weights in use differ from the published ones
            return None
        return state

    try:
        return receive(address, device=device, held=Held(live, change) if live else None)
    except (OSError, RuntimeError, ValueError) as exc:
        raise EngineError(f"weights could not be received from {address}: {first_line(exc)}") from exc
