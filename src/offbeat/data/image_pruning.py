"""Removes stored images that no run can need any more: `offbeat data prune`.

Each run notes the images of its rows beside them (`ImageStore`). An image goes when the folders of all runs that
have noted it are gone. One that no run has noted stays, because nothing is known of it.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat.data.image_store import NOTES, PICTURE, SUFFIX, read_notes

_YOUNG_S = 3600.0
"""Age up to which a note counts although there is no folder: its run may be about to make one, or it is of `offbeat data show`."""


@dataclass(frozen=True)
class Pruned:
    """What was removed and what is left. `runs` names the runs that are gone, in order; no run has noted `num_unknown` kept images."""

    runs: tuple[str, ...]
    num_removed: int
    removed_bytes: int
    num_kept: int
    num_unknown: int


def prune_images(folder: Path) -> Pruned:
    """Remove images of a store, and notes, that are of runs alone whose folders beside the store are gone.

    A run whose folder was moved aside, such as `NAME.1`, and an evaluation beside it, such as `NAME-eval`, keep its images, too.
    """
    notes = {path.stem: path for path in sorted(folder.glob(f"*{NOTES}"))}
    gone = {name: path for name, path in notes.items() if not _has_folder(folder.parent, name)}
    gone = {name: path for name, path in gone.items() if time.time() - path.stat().st_mtime >= _YOUNG_S}
    kept = {image for name, path in notes.items() if name not in gone for image in read_notes(path)}
    removable = {image for path in gone.values() for image in read_notes(path)} - kept
    _forget_sources(folder, removable)
    for name in notes.keys() - gone.keys():  # what runs have begun to use meanwhile; a source that is forgotten is looked up no more
        removable -= read_notes(notes[name])
    removed_bytes = num_removed = 0
    for image in removable:
        for suffix in (SUFFIX, PICTURE):
            path = folder / f"{image}{suffix}"
            with suppress(FileNotFoundError):
                size = path.stat().st_size
                path.unlink()
                num_removed, removed_bytes = num_removed + (suffix == SUFFIX), removed_bytes + size
    for path in gone.values():
        path.unlink(missing_ok=True)
    left = {int(path.stem) for path in folder.glob(f"*{SUFFIX}")}
    return Pruned(tuple(gone), num_removed, removed_bytes, len(left), len(left - kept))


def _has_folder(runs: Path, name: str) -> bool:
    return any(path.is_dir() and (path.name == name or path.name.startswith((f"{name}.", f"{name}-"))) for path in runs.iterdir())


def _forget_sources(folder: Path, images: set[int]) -> None:
    """Remove the notes of which file became which image, before the images, so that no note names an image that is gone."""
    for path in folder.glob("*.source"):
        with suppress(OSError, ValueError):
            if int(path.read_text()) in images:
                path.unlink()
