"""Stores rollouts as `rollouts/step-000010.jsonl.zst`, one group per line as encoded by the controller, within a bound of bytes.

Groups that were not trained on are stored with the next step, for example in `rejected-000010.jsonl.zst` with step 10.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import zstandard

from offbeat.disk import remove_parts, replacing
from offbeat.errors import StorageError

_FILE = re.compile(r"(?:step|rejected)-(\d{6,})\.jsonl\.zst")
_MOST_REJECTED_TOKENS = 2_000_000
"""Bound on the tokens of rejected groups that wait for the next step; older groups are dropped, since they occupy memory."""

RejectedLine = Callable[[int], bytes]
"""Returns the JSON line of a rejected group; called with the step that is stored next."""


class RolloutLog:
    """The folder of a run's rollouts. `write` is called on one thread, `reject` on another."""

    def __init__(self, folder: Path, *, most_bytes: int | None = None) -> None:
        """The first write creates `folder`. Older steps are thinned out above `most_bytes` in total; None keeps all."""
        self._folder = folder
        self._most_bytes = most_bytes
        self._rejected: deque[tuple[int, RejectedLine]] = deque()
        self._rejected_tokens = 0
        remove_parts(folder)

    def reject(self, num_tokens: int, line: RejectedLine) -> None:
        """Note a group of `num_tokens` tokens in memory that is not trained on; `line` is called on the thread that writes."""
        self._rejected.append((num_tokens, line))
        self._rejected_tokens += num_tokens
        while self._rejected_tokens > _MOST_REJECTED_TOKENS and len(self._rejected) > 1:
            self._rejected_tokens -= self._rejected.popleft()[0]

    def take_rejected(self) -> list[RejectedLine]:
        """Return the groups noted since the last call."""
        taken = [line for _, line in self._rejected]
        self._rejected.clear()
        self._rejected_tokens = 0
        return taken

    def write(self, step: int, lines: Iterable[bytes], rejected: Sequence[RejectedLine] = ()) -> Path:
        """Write the groups of one step, replacing existing files; a crash leaves the old files intact.

        `lines` are one JSON object each, without a line break; `rejected` are of groups that were not trained on. Raises StorageError if
        the folder cannot be written.
        """
        turned_down = self._folder / f"rejected-{step:06d}.jsonl.zst"
        path = self._folder / f"step-{step:06d}.jsonl.zst"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if rejected:
                _write_lines(turned_down, (line(step) for line in rejected))
            else:
                turned_down.unlink(missing_ok=True)
            _write_lines(path, lines)
            self._thin()
        except OSError as exc:
            raise StorageError(f"cannot write {path}: {exc.strerror}; free space, or set telemetry.rollouts_every_steps to 0") from exc
        return path

    def has(self, step: int) -> bool:
        return (self._folder / f"step-{step:06d}.jsonl.zst").exists()

    def resume_after(self, step: int) -> None:
        """Remove the files of later steps, which are repeated."""
        for later, files in self._files().items():
            if later > step:
                for path in files:
                    path.unlink(missing_ok=True)

    def _thin(self) -> None:
        if self._most_bytes is None:
            return
        files = self._files()
        sizes = {step: sum(path.stat().st_size for path in own) for step, own in files.items()}
        for step in to_thin_out(sizes, most_bytes=self._most_bytes):
            for path in files[step]:
                path.unlink(missing_ok=True)

    def _files(self) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if match := _FILE.fullmatch(path.name):
                found.setdefault(int(match[1]), []).append(path)
        return found


def to_thin_out(sizes: Mapping[int, int], *, most_bytes: int) -> list[int]:
    """Choose the steps to remove, so that the others are at most `most_bytes` in total, or only the newest is left; `sizes` are bytes.

    Of the older half of the steps, every second one goes, and again until the rest fits: e.g. steps 2 and 4 of 1 to 8, of 10 bytes each,
    with `most_bytes` = 60. So old steps thin out, and the first one remains longest.
    """
    left, removed = sorted(sizes), []
    total = sum(sizes.values())
    while total > most_bytes and len(left) > 1:
        older = left[: max(len(left) // 2, 2)]
        going = older[1::2] if len(left) > 2 else left[:1]
        removed += going
        total -= sum(sizes[step] for step in going)
        left = [step for step in left if step not in going]
    return removed


def _write_lines(path: Path, lines: Iterable[bytes]) -> None:
    with replacing(path) as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
        for line in lines:
            writer.write(line + b"\n")
