"""The checkpoints of a run on disk: which one to resume from, and which to remove. Torch-free: the controller owns it.

A checkpoint is a folder `step-00000050`; those of supervised fine-tuning have another word in their name. Ranks write their part into it;
when all have, the controller writes `complete.json` with its own state. A folder without that file does not exist for recovery, so a crash
at any moment leaves the previous checkpoint the newest.
"""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import StorageError

MARKER = "complete.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        step: optimizer steps done when it was taken.
        folder: where it lies.
        payload: what the controller gave to `CheckpointIndex.complete`.
    """

    step: int
    folder: Path
    payload: bytes


class CheckpointIndex:
    """The checkpoints of one kind below one directory."""

    def __init__(self, directory: Path, kind: str = "step") -> None:
        """`kind` is what their names begin with; others in the directory are left alone."""
        self.directory = directory
        self.kind = kind

    def folder(self, step: int) -> Path:
        """Where the checkpoint of `step` goes; not created here."""
        return self.directory / f"{self.kind}-{step:08d}"

    def complete(self, step: int, payload: bytes) -> None:
        """Declare the checkpoint of `step` complete, atomically, once all of it is on disk.

        Raises:
            StorageError: the marker could not be written; earlier checkpoints are intact.
        """
        marker = self.folder(step) / MARKER
        part = marker.with_suffix(".part")
        try:
            marker.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            part.replace(marker)
            _sync_folder(marker.parent)
        except OSError as exc:
            raise StorageError(f"{marker} could not be written: {exc.strerror}; earlier checkpoints are intact") from exc

    def newest(self) -> Checkpoint | None:
        """The complete checkpoint of the highest step, or None."""
        steps = self._complete_steps()
        if not steps:
            return None
        folder = self.folder(steps[-1])
        return Checkpoint(steps[-1], folder, (folder / MARKER).read_bytes())

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` >= 1 complete checkpoints, and what crashes left unfinished before the newest one."""
        assert keep >= 1, f"at least one checkpoint is kept, got keep={keep}"
        complete = self._complete_steps()
        kept = set(complete[-keep:])
        for step in self._steps():
            if complete and step < complete[-1] and step not in kept:
                self._remove(step)

    def clear(self) -> None:
        """Remove all of them."""
        for step in self._steps():
            self._remove(step)

    def _remove(self, step: int) -> None:
        # Without its marker first: a removal that is cut off must not leave half a checkpoint that looks complete.
        (self.folder(step) / MARKER).unlink(missing_ok=True)
        shutil.rmtree(self.folder(step))

    def _steps(self) -> list[int]:
        names = (path.name for path in self.directory.iterdir()) if self.directory.is_dir() else ()
        name_of = re.compile(rf"{re.escape(self.kind)}-(\d{{8,}})")
        return sorted(int(match[1]) for name in names if (match := name_of.fullmatch(name)))

    def _complete_steps(self) -> list[int]:
        return [step for step in self._steps() if (self.folder(step) / MARKER).is_file()]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
