"""The contents of a checkpoint: size and checksum of every file, recorded in the marker that makes it complete. Torch-free.

The marker is one JSON object: the controller's state, `format`, `step`, `files`, and a `checksum` of all of it. `recover` checks for damage
at two depths: `look` reads the marker and compares sizes, `read_through` reads every byte. They find accidents, not attacks.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from offbeat.disk import sha256
from offbeat.errors import ConfigError

MARKER = "complete.json"
FORMAT = 1
"""Version of the files of checkpoints. It rises with a change that an older Offbeat would misread; files without one are of the first.
Every format keeps `format` and `checksum`, so that a newer one is told from a damaged one."""

_NUM_THREADS = 4
"""Number of files read at once; hashing releases the interpreter lock, and one core hashes about 1.6 GB/s."""


def seal(folder: Path, step: int, state: bytes) -> bytes:
    """Build the marker of a checkpoint whose files are all written, which reads all of them; `state` is the controller's, a JSON object.

    Returns:
        A JSON object, such as {..., "format": 1, "step": 50, "files": {"ranks/__0_0.distcp": {"bytes": 2560, "sha256": "..."}},
        "checksum": "..."}.
    """
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        names = _names(folder)
        sums = pool.map(sha256, (folder / name for name in names))
        files = {name: {"bytes": (folder / name).stat().st_size, "sha256": digest} for name, digest in zip(names, sums, strict=True)}
    return _marker(state, step, files)


def reseal(folder: Path, step: int, state: bytes) -> bytes:
    """Build the marker of a complete checkpoint with another state of the controller; its files are as they were."""
    return _marker(state, step, _read_marker(folder)["files"])


def _marker(state: bytes, step: int, files: Mapping[str, Any]) -> bytes:
    marker = {**json.loads(state), "format": FORMAT, "step": step, "files": files}
    return json.dumps(marker | {"checksum": _checksum(marker)}, separators=(",", ":")).encode()


def is_sealed(marker: bytes) -> bool:
    """Whether a marker has checksums; early versions wrote none."""
    return "checksum" in json.loads(marker)


def look(folder: Path, step: int) -> str:
    """Return the damage to a checkpoint that its marker and file sizes show, such as "ranks/.metadata is gone"; "" for none.

    Checkpoints from before there were checksums are accepted as they are if they are of this step.

    Raises:
        ConfigError: a newer Offbeat has written it, in a format that this one does not know.
    """
    try:
        marker = _read_marker(folder)
    except OSError as exc:
        return f"{MARKER} {_reason(exc)}"
    except (ValueError, RecursionError):
        return f"{MARKER} is not as it was written"
    if not marker.keys() & {"files", "checksum"}:
        return "" if marker.get("global_step") == step else f"{MARKER} is not that of step {step}"
    if marker.pop("checksum", "") != _checksum(marker):
        return f"{MARKER} is not as it was written"
    if marker.get("format", 1) > FORMAT:
        raise ConfigError(
            f"{folder} has format {marker['format']}, made by a newer Offbeat than this one, which knows up to {FORMAT}; upgrade Offbeat,"
            " or give run.name a new name")
    if marker["step"] != step:
        return f"{MARKER} is that of step {marker['step']}"
    for name, about in marker["files"].items():
        try:
            size = (folder / name).stat().st_size
        except OSError as exc:
            return f"{name} {_reason(exc)}"
        if size != about["bytes"]:
            return f"{name} has {size} bytes, and was written with {about['bytes']}"
    return ""


def read_through(folder: Path) -> str:
    """Return the first file of a checkpoint that has other bytes than were written, as a sentence; "" for none. It has passed `look`."""
    files: Mapping[str, Mapping[str, Any]] = _read_marker(folder).get("files", {})
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = pool.map(_digest_or_reason, (folder / name for name in files))
        for (name, about), (digest, reason) in zip(files.items(), found, strict=True):
            if reason:
                return f"{name} {reason}"
            if digest != about["sha256"]:
                return f"{name} has other bytes than were written"
    return ""


def file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of a complete checkpoint's files as written, by name as "ranks/__0_0.distcp"; empty if older than checksums."""
    return {name: about["sha256"] for name, about in _read_marker(folder).get("files", {}).items()}


def _read_marker(folder: Path) -> dict[str, Any]:
    marker = json.loads((folder / MARKER).read_bytes())
    if not isinstance(marker, dict):
        raise ValueError(f"it holds {type(marker).__name__}, not an object")
    return marker


def _names(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and not (path.parent == folder and path.stem == Path(MARKER).stem))
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _checksum(marker: Mapping[str, Any]) -> str:
    """Hash the values, not the bytes, so that a tool may rewrite the file; a flipped bit that changes no value is no damage."""
    text = json.dumps(marker, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _digest_or_reason(path: Path) -> tuple[str, str]:
    try:
        return sha256(path), ""
    except OSError as exc:
        return "", _reason(exc)


def _reason(exc: OSError) -> str:
    return "is gone" if isinstance(exc, FileNotFoundError) else f"cannot be read: {exc.strerror}"
