"""Manifest of a checkpoint's folder: its files with their checksums. A folder is complete once it has a manifest.

Called by `checkpoints`, on its threads.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from offbeat.disk import sha256, sync
from offbeat.errors import StorageError
from offbeat.service.orphans import FOLDER
from offbeat.weights.protocol import Manifest

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class File:
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Contents:
    """Contents of a folder; `adapter` is None if engines cannot load it."""

    files: dict[str, File]
    adapter: Manifest | None = None


class CheckpointError(StorageError):
    """A checkpoint's files are damaged or missing, or cannot be written. The message is for clients, and hides the files' paths."""


def _described(path: Path) -> File:
    return File(sha256(path), path.stat().st_size)


def seal(folder: Path, adapter: Manifest | None) -> int:
    """Write a folder's manifest and sync all files, from any process; returns their size in bytes. Raises CheckpointError if that fails."""
    try:
        files = {path.name: _described(path) for path in sorted(folder.iterdir()) if path.is_file()}
        (folder / MANIFEST).write_bytes(msgspec.json.encode({"files": files, "adapter": adapter and _encode(adapter)}))
        for path in (*(folder / name for name in files), folder / MANIFEST, folder, folder.parent):
            sync(path)
    except OSError as exc:
        raise CheckpointError(f"the checkpoint folder {folder.name} could not be written: {exc.strerror}; free space") from exc
    return sum(file.size_bytes for file in files.values())


def read_manifest(folder: Path) -> Contents:
    """Read a folder's manifest; raises CheckpointError if it is missing or unreadable."""
    try:
        contents = msgspec.convert(_decode(msgspec.json.decode((folder / MANIFEST).read_bytes())), Contents)
    except (OSError, msgspec.DecodeError) as exc:
        raise CheckpointError(
            f"the checkpoint folder {folder.name} is gone or damaged: its manifest cannot be read; use another one") from exc
    return contents


def _encode(adapter: Manifest) -> dict[str, Any]:
    """Return an adapter's manifest as the file stores it, where the adapter's name is called the tenant's."""
    fields = msgspec.to_builtins(adapter)
    del fields["broadcast"]
    return {"tenant": fields.pop("adapter"), **fields}


def _decode(contents: Any) -> Any:
    """Invert `_encode`, and upgrade a manifest by an earlier Offbeat, which stored only the mean of the canary's log-probabilities."""
    adapter = contents.get("adapter") if isinstance(contents, dict) else None
    if isinstance(adapter, dict):
        adapter["adapter"] = adapter.pop("tenant", None)
        if "canary_logprob" in adapter:
            adapter.setdefault("canary_logprobs", [adapter["canary_logprob"]])
    return contents


def verify(folder: Path) -> Contents:
    """Compare every file with the manifest and return it; raises CheckpointError unless all contents are as they were sealed."""
    contents = read_manifest(folder)
    for name, expected in contents.files.items():
        try:
            found = _described(folder / name)
        except OSError as exc:
            raise CheckpointError(f"the checkpoint folder {folder.name} is damaged: {name} cannot be read; use another one") from exc
        if found != expected:
            raise CheckpointError(f"the checkpoint folder {folder.name} is damaged: {name} is not what was written; use another one")
    return contents


def sealed_folders(root: Path) -> frozenset[str]:
    """Return the names of all complete folders, also of ones set aside."""
    return frozenset(path.parent.name for pattern in ("*", f"{FOLDER}/*/*") for path in root.glob(f"{pattern}/{MANIFEST}"))
