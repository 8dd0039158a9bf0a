"""The checkpoints of a run on disk: which one to resume from, and which to remove. Torch-free: the controller owns it.

A checkpoint is a folder such as `step-00000050`, or `sft-00000050` for supervised fine-tuning. Ranks write their parts into it; when all
have, the controller writes `complete.json`: its own state, with size and checksum of every file. For recovery a folder without that file
does not exist, so after a crash at any moment the previous checkpoint is still the newest. A checkpoint whose files differ from that record
is damaged: it is never loaded, but set aside in favour of the one before.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offbeat.checkpoint.manifest import MARKER, look, read_through, reseal, seal
from offbeat.disk import remove_tree, sync
from offbeat.errors import StorageError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint after `step` optimizer steps; `payload` is the controller's state, a JSON object."""

    step: int
    folder: Path
    payload: bytes


@dataclass(frozen=True)
class Damage:
    """A checkpoint that cannot be used; `reason` names a changed file. An interrupted save, never `finished`, is not worth keeping."""

    step: int
    folder: Path
    reason: str
    finished: bool = True

    def __str__(self) -> str:
        return f"{self.folder.name} is {'damaged' if self.finished else 'not complete'}: {self.reason}"


class CheckpointIndex:
    """The checkpoints of one kind below one directory."""

    def __init__(self, directory: Path, kind: str = "step") -> None:
        """`kind` is the prefix of their names; other folders in the directory are left alone."""
        self.directory = directory
        self.kind = kind

    def folder(self, step: int) -> Path:
        """Return the folder for the checkpoint of `step`; not created here."""
        return self.directory / f"{self.kind}-{step:08d}"

    def complete(self, step: int, state: bytes) -> None:
        """Declare the checkpoint of `step` complete, atomically, once all of it is on disk. Reads every file for its checksum.

        Raises:
            StorageError: the marker could not be written; earlier checkpoints are intact.
        """
        folder = self.folder(step)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            sealed = seal(folder, step, state)
            for inner in [path for path in folder.iterdir() if path.is_dir()]:
                sync(inner)
            self._write_marker(folder, sealed)

    def amend(self, step: int, state: bytes) -> None:
        """Replace the controller's state in a complete checkpoint, atomically; all stays as it was if this raises StorageError."""
        folder = self.folder(step)
        with _writing(folder):
            self._write_marker(folder, reseal(folder, step, state))

    def _write_marker(self, folder: Path, sealed: bytes) -> None:
        marker = folder / MARKER
        part = marker.with_suffix(".part")
        part.write_bytes(sealed)
        sync(part)
        part.replace(marker)
        sync(folder)
        sync(self.directory)

    def newest(self) -> Checkpoint | None:
        """Return the complete checkpoint of the highest step whose files exist with the right sizes, or None. Fast: reads only markers."""
        return self._search(thorough=False)[0]

    def damaged(self) -> list[Damage]:
        """Complete checkpoints newer than `newest` with files that are missing or of another size."""
        return [damage for damage in self._search(thorough=False)[1] if damage.finished]

    def choose(self) -> tuple[Checkpoint | None, list[Damage]]:
        """Return the newest checkpoint whose every byte is as written, or None, and the damaged ones newer than it, newest first."""
        return self._search(thorough=True)

    def complete_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending; does not look for damage."""
        return [step for step in self._steps() if (self.folder(step) / MARKER).is_file()]

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that nothing loads or removes it; returns its new path, such as `step-00000050.damaged`."""
        folder = self.folder(step)
        aside, number = folder.with_name(f"{folder.name}.damaged"), 1
        while aside.exists():
            aside, number = folder.with_name(f"{folder.name}.damaged.{number}"), number + 1
        folder.rename(aside)
        return aside

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` >= 1 complete checkpoints, and unfinished ones older than the newest."""
        assert keep >= 1, f"at least one checkpoint is kept, got keep={keep}"
        complete = self.complete_steps()
        kept = set(complete[-keep:])
        for step in self._steps():
            if complete and step < complete[-1] and step not in kept:
                self._remove(step)

    def clear(self) -> None:
        """Remove all checkpoints of this kind."""
        for step in self._steps():
            self._remove(step)

    def _search(self, *, thorough: bool) -> tuple[Checkpoint | None, list[Damage]]:
        damages = []
        for step in reversed(self._steps()):
            folder = self.folder(step)
            if not (folder / MARKER).exists():
                if any(folder.iterdir()):
                    damages.append(Damage(step, folder, f"it has no {MARKER}, as when a save is cut off", finished=False))
                continue
            reason = look(folder, step) or (read_through(folder) if thorough else "")
            if not reason:
                return Checkpoint(step, folder, (folder / MARKER).read_bytes()), damages
            damages.append(Damage(step, folder, reason))
        return None, damages

    def _remove(self, step: int) -> None:
        # The marker goes first: an interrupted removal must not leave half a checkpoint that looks complete.
        try:
            (self.folder(step) / MARKER).unlink(missing_ok=True)
        except OSError as exc:
            _log.warning("%s cannot be removed: %s; it is tried again after the next checkpoint", self.folder(step), exc.strerror)
            return
        if why := remove_tree(self.folder(step)):
            _log.warning("%s; it is tried again after the next checkpoint", why)

    def _steps(self) -> list[int]:
        paths = (path for path in self.directory.iterdir() if path.is_dir()) if self.directory.is_dir() else ()
        name_of = re.compile(rf"{re.escape(self.kind)}-(\d{{8,}})")
        return sorted(int(match[1]) for path in paths if (match := name_of.fullmatch(path.name)))


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StorageError(f"{folder / MARKER} could not be written: {exc.strerror}; earlier checkpoints are intact") from exc


def none_sound(damages: Sequence[Damage]) -> StorageError:
    """Build the error for a run that has checkpoints, none of which can be used."""
    listed = "; ".join(str(damage) for damage in damages)
    return StorageError(
        f"no checkpoint in {str(damages[0].folder.parent)!r} can be resumed from ({listed}); put sound copies of the files there, or give"
        " run.name a new name to begin anew")
