"""Stores samples of the policy's output in `rollouts/step-000010.jsonl.zst`, one group per line, as encoded by the controller."""

from collections.abc import Iterable
from pathlib import Path

import zstandard

from offbeat.errors import StorageError


def write_rollouts(folder: Path, *, step: int, lines: Iterable[bytes]) -> Path:
    """Write the groups of one step, replacing an existing file; a crash leaves the old file intact.

    Args:
        folder: the run's `rollouts` folder, created if missing.
        step: global step, which becomes part of the file name.
        lines: one JSON object each, without a line break.

    Raises:
        StorageError: the folder cannot be written.
    """
    path = folder / f"step-{step:06d}.jsonl.zst"
    unfinished = folder / f".{path.name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
            for line in lines:
                writer.write(line + b"\n")
        unfinished.replace(path)
    except OSError as exc:
        raise StorageError(f"cannot write {path}: {exc.strerror}; free space, or set telemetry.rollouts_every_steps to 0") from exc
    return path
