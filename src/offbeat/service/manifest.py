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
from offbeat.weights.adapters import AdapterManifest

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class File:
    """A file's checksum and size."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """Contents of a folder; `adapter` is None if engines cannot load it."""

    files: dict[str, File]
    adapter: AdapterManifest | None = None


class CheckpointError(StorageError):
    """A checkpoint's files are damaged or missing, or cannot be written. The message is for clients, and does not say where they are."""


def _described(path: Path) -> File:
    return File(sha256(path), path.stat().st_size)


def seal(folder: Path, adapter: AdapterManifest | None) -> int:
    """Write the manifest of a folder and sync everything in it, whichever process wrote it. Returns the size of its files in bytes.

    Raises:
        CheckpointError: the folder cannot be read or written.
    """
    try:
        files = {path.name: _described(path) for path in sorted(folder.iterdir()) if path.is_file()}
        (folder / MANIFEST).write_bytes(msgspec.json.encode(Manifest(files, adapter)))
        for path in (*(folder / name for name in files), folder / MANIFEST, folder, folder.parent):
            sync(path)
    except OSError as exc:
        raise CheckpointError(f"the checkpoint folder {folder.name} could not be written: {exc.strerror}; free space") from exc
    return sum(file.size_bytes for file in files.values())


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest; raises CheckpointError if it is missing or unreadable."""
    try:
        manifest = msgspec.convert(_with_canary(msgspec.json.decode((folder / MANIFEST).read_bytes())), Manifest)
    except (OSError, msgspec.DecodeError) as exc:
        raise CheckpointError(
            f"the checkpoint folder {folder.name} is gone or damaged: its manifest cannot be read; use another one") from exc
    return manifest


def _with_canary(manifest: Any) -> Any:
    """Upgrade a manifest by an earlier Offbeat, which stored only the mean of the canary's log-probabilities."""
    adapter = manifest.get("adapter") if isinstance(manifest, dict) else None
    if isinstance(adapter, dict) and "canary_logprob" in adapter:
        adapter.setdefault("canary_logprobs", [adapter["canary_logprob"]])
    return manifest


def verify(folder: Path) -> Manifest:
    """Compare every file with the manifest and return it; raises CheckpointError unless all contents are as they were sealed."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        try:
            found = _described(folder / name)
        except OSError as exc:
            raise CheckpointError(f"the checkpoint folder {folder.name} is damaged: {name} cannot be read; use another one") from exc
        if found != expected:
            raise CheckpointError(f"the checkpoint folder {folder.name} is damaged: {name} is not what was written; use another one")
    return manifest


def sealed_folders(root: Path) -> frozenset[str]:
    """Return the names of all complete folders, including those set aside."""
    return frozenset(path.parent.name for pattern in ("*", f"{FOLDER}/*/*") for path in root.glob(f"{pattern}/{MANIFEST}"))
