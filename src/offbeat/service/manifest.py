"""The manifest of a checkpoint's folder: what files it holds, with their checksums. A folder is complete from the moment it has one.

Called by `checkpoints`, on its threads.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from offbeat.disk import sync
from offbeat.errors import StorageError
from offbeat.service.orphans import FOLDER
from offbeat.weights.protocol import Manifest

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class File:
    """A file's checksum and size."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Contents:
    """What a folder holds; `adapter` is None if engines cannot load it."""

    files: dict[str, File]
    adapter: Manifest | None = None


class CheckpointError(StorageError):
    """A checkpoint's files are damaged, gone, or cannot be written. Its sentence is for clients, and does not say where they are."""


def _digest(path: Path) -> File:
    with path.open("rb") as file:
        return File(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def seal(folder: Path, adapter: Manifest | None) -> int:
    """Write the manifest of a folder and sync all of it, whoever wrote it; the size of its files in bytes.

    Raises:
        CheckpointError: it cannot be read or written.
    """
    try:
        files = {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.is_file()}
        (folder / MANIFEST).write_bytes(msgspec.json.encode({"files": files, "adapter": adapter and _encode(adapter)}))
        for path in (*(folder / name for name in files), folder / MANIFEST, folder, folder.parent):
            sync(path)
    except OSError as exc:
        raise CheckpointError(f"the checkpoint folder {folder.name} could not be written: {exc.strerror}; free space") from exc
    return sum(file.size_bytes for file in files.values())


def read_manifest(folder: Path) -> Contents:
    """What a folder holds; raises CheckpointError if there is no manifest that can be read."""
    try:
        contents = msgspec.convert(_decode(msgspec.json.decode((folder / MANIFEST).read_bytes())), Contents)
    except (OSError, msgspec.DecodeError) as exc:
        raise CheckpointError(
            f"the checkpoint folder {folder.name} is gone or damaged: its manifest cannot be read; use another one") from exc
    return contents


def _encode(adapter: Manifest) -> dict[str, Any]:
    """Return an adapter's manifest as it stands in the file, where its name is called the tenant's."""
    fields = msgspec.to_builtins(adapter)
    del fields["broadcast"]
    return {"tenant": fields.pop("adapter"), **fields}


def _decode(contents: Any) -> Any:
    """The inverse; an earlier Offbeat has written the mean of the canary's log-probabilities alone."""
    adapter = contents.get("adapter") if isinstance(contents, dict) else None
    if isinstance(adapter, dict):
        adapter["adapter"] = adapter.pop("tenant", None)
        if "canary_logprob" in adapter:
            adapter.setdefault("canary_logprobs", [adapter["canary_logprob"]])
    return contents


def verify(folder: Path) -> Contents:
    """What a folder holds, after a look at every byte; raises CheckpointError unless all is as it was sealed."""
    contents = read_manifest(folder)
    for name, expected in contents.files.items():
        try:
            found = _digest(folder / name)
        except OSError as exc:
            raise CheckpointError(f"the checkpoint folder {folder.name} is damaged: {name} cannot be read; use another one") from exc
        if found != expected:
            raise CheckpointError(f"the checkpoint folder {folder.name} is damaged: {name} is not what was written; use another one")
    return contents


def sealed_folders(root: Path) -> frozenset[str]:
    """Names of the folders that are complete, those that were put aside included."""
    return frozenset(path.parent.name for pattern in ("*", f"{FOLDER}/*/*") for path in root.glob(f"{pattern}/{MANIFEST}"))
