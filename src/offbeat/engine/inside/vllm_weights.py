"""Gets the weights of a version for a vLLM server: whole, or as changes of the version before. Used by `vllm_inside`.

vLLM's workers have weights fused and packed, so that no changes can be applied to them. The API server applies them to the files from which
the workers have read the version that is served, and the workers read the result from its memory, as they read a broadcast.
"""

import dataclasses
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from vllm_files import MemoryFile, RefusedError, files_of, fingerprint_tensors, offbeat_module, read_files, read_shapes


@dataclasses.dataclass(frozen=True)
class Weights:
    """The whole weights of a version. A resumed run may use its number again for others.

    Attributes:
        folder: where they were written, or would be if they had not been broadcast.
        fingerprint: their fingerprint according to the publisher; empty if it says nothing.
        keep: whether to keep `memory` for as long as they are served, because the next version may be changes of this one.
        memory: weights that were received, or made from changes; None if the folder holds all of them.
    """

    folder: str
    fingerprint: str
    keep: bool = False
    memory: MemoryFile | None = None

    @property
    def files(self) -> list[Path]:
        """Safetensors files with these weights and nothing else; empty if the folder is gone."""
        return [self.memory.path] if self.memory else files_of(self.folder)

    def lasting(self) -> "Weights | None":
        """Return the weights if they are still there after loading; otherwise None."""
        return self if self.keep or self.memory is None else None


def obtain(folder: str, fingerprint: str, *, broadcast: str, keep: bool, held: Weights | None) -> Weights:
    """Get the whole weights of a version, whose folder may hold changes; changes to the `held` weights being served are applied to them.

    With `broadcast`, a `host:port`, weights are received from there instead of read from the folder.

    Raises:
        RefusedError: the folder is damaged, or holds changes to weights that are not there.
        OSError, RuntimeError: the weights were not received.
    """
    if broadcast and (received := _receive(broadcast, fingerprint, held)) is not None:
        return Weights(folder, fingerprint, keep, MemoryFile(received))
    changes = offbeat_module("model", "changes")
    try:
        if changes.base_of(folder) is None:
            return Weights(folder, fingerprint, keep)
    except changes.ChangesError as exc:
        raise RefusedError(str(exc)) from exc
    return Weights(folder, fingerprint, keep, MemoryFile(_read_changes(folder, fingerprint, held)))


def _receive(address: str, fingerprint: str, held: Weights | None) -> dict[str, torch.Tensor] | None:
    """Receive weights, or if they are offered the changes since `held`; None if the folder is to be read."""
    broadcast, changes = offbeat_module("sync", "broadcast"), offbeat_module("model", "changes")

    def change(changed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        assert held is not None, "otherwise no changes are asked for"
        try:
            tensors = dict(read_files(held.files))
            changes.apply_changes(tensors, changed)
        except (changes.ChangesError, OSError, SafetensorError):
            return None
        return None if _differ(tensors, fingerprint) else tensors

    base = broadcast.Held(held.folder, change) if held is not None and held.files else None
    return broadcast.receive(address, device=torch.device("cpu"), held=base)


def _read_changes(folder: str, fingerprint: str, held: Weights | None) -> dict[str, torch.Tensor]:
    """Read a folder of changes on top of `held`, or if they do not fit, of the last whole version and all changes since.

    Raises RefusedError if they fit neither; the message says why not the latter.
    """
    changes, reason = offbeat_module("model", "changes"), ""
    for base in (held, None) if held is not None else (None,):
        try:
            tensors = changes.read_weights(folder, read_whole=_read_whole, held=partial(_tensors_of, base))
            if not (reason := _differ(tensors, fingerprint)):
                return tensors
            del tensors  # before the next are read
        except (changes.ChangesError, RefusedError, OSError, SafetensorError) as exc:
            reason = str(exc)
    raise RefusedError(f"{folder} cannot be read: {reason}")


def _tensors_of(held: Weights | None, folder: Path) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a folder if they are held."""
    return dict(read_files(held.files)) if held is not None and Path(held.folder) == folder and held.files else None


def _read_whole(folder: Path) -> dict[str, torch.Tensor]:
    files = files_of(str(folder))
    if not read_shapes(files):
        raise RefusedError(f"{folder} holds no *.safetensors file that can be read here")
    return dict(read_files(files))


def _differ(tensors: dict[str, torch.Tensor], fingerprint: str) -> str:
    """Say how the fingerprint of changed weights differs from the published one; empty if it does not, or if that is empty."""
    found = fingerprint_tensors(tensors.items()) if fingerprint else ""
    return "" if found == fingerprint else f"with what they build on, its changes have fingerprint {found} instead of {fingerprint}"
