"""Stores answers of a run's evaluations: `evaluations/step-000010.jsonl.zst` of held-out prompts, `step-000010-NAME.jsonl.zst` of a set."""

import re
from collections.abc import Iterable
from pathlib import Path

import zstandard

from offbeat.disk import replacing
from offbeat.errors import StorageError

RESULT_NAME = "evaluation.json"
"""Name of the result of `offbeat eval` in its folder."""
_FILE = re.compile(r"step-(\d+)(?:-([a-z0-9_]+))?\.jsonl\.zst")


def stored_evaluations(run_dir: Path) -> dict[Path, tuple[int, str]]:
    """Return the global step and the set of each evaluation that a run has stored, by its file, in the order of steps."""
    found = {path: _FILE.fullmatch(path.name) for path in (run_dir / "evaluations").glob("step-*")}
    steps = {path: (int(match[1]), match[2] or "") for path, match in found.items() if match is not None}
    return dict(sorted(steps.items(), key=lambda item: item[1]))


def write_evaluation(run_dir: Path, *, step: int, name: str, lines: Iterable[bytes]) -> Path:
    """Write the answers to one set after a step, replacing an existing file; a crash leaves the old file intact.

    `name` is the set's, "" for held-out prompts; `lines` are one JSON object each, without a line break. Raises StorageError if the
    folder cannot be written.
    """
    path = run_dir / "evaluations" / f"step-{step:06d}{f'-{name}' if name else ''}.jsonl.zst"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
            for line in lines:
                writer.write(line + b"\n")
    except OSError as exc:
        raise StorageError(f"cannot write {path}: {exc.strerror}; free space, or set evaluate.keep_samples to false") from exc
    return path


def forget_evaluations(run_dir: Path, *, after: int) -> None:
    """Remove the answers of evaluations after a step, which a resumed run repeats."""
    for path, (step, _) in stored_evaluations(run_dir).items():
        if step > after:
            path.unlink()
