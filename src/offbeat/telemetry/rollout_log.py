"""Samples of what the policy wrote, `rollouts/step-000010.jsonl.zst`: one encoded group per line, as the controller hands them over."""

from collections.abc import Iterable
from pathlib import Path

import zstandard

from offbeat.errors import StorageError


def write_rollouts(folder: Path, *, step: int, lines: Iterable[bytes]) -> Path:
    """Write the groups of one step; a file of that step is replaced, and a crash leaves the old one.

    Args:
        folder: the run's `rollouts` folder; made if missing.
        step: global step, part of the name.
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
