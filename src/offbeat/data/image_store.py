"""Images as a model's processor has made them, each stored once, and the token ids that stand for them.

A prompt holds a stored image's own id, from `FIRST_ID` on, in the places of the model's image token. The id is made of the hash of the
pixel values, so that tokens alone say which pixels belong to them: equal prompts are equal images, whatever caches, packs or resends them.
Each process reads the image by its id from the run's folder, and checks the hash.
"""

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offbeat.data import wire
from offbeat.disk import replacing
from offbeat.errors import BusyError, DataError, StorageError

FIRST_ID = 1 << 30
"""The least id of an image. No vocabulary has so many tokens; ids up to 2**31 fit int32."""

SUFFIX, PICTURE, NOTES = ".image", ".png", ".run"
"""Ends of the names of files: of an image and of a small picture of it by its id, and of the ids that a run has used by the run's name."""

_SOURCE = ".source"
"""End of the names of files that have the id of the image that was made of a source."""

_MOST_PROBES = 8
"""Ids that are tried where different images have the same."""
_KEPT_BYTES = 1 << 28
"""Bytes of images that a process keeps in memory."""
_UNUSED_S = 3600.0
"""Seconds after which an image may be removed to make room: longer than a request waits and is answered."""


@dataclass(frozen=True, eq=False)
class StoredImage:
    """An image as the model gets it.

    Attributes:
        id: its token id.
        tokens: [P] int32, what stands in a prompt: tokens of the vocabulary around its own id, which occurs at its placeholders.
        arrays: inputs of the model's `get_image_features` by name, such as `pixel_values`.
        grid: rows and columns of placeholders, for positions of several dimensions; (0, 0) where positions are those of text.
        size: width and height in pixels of the image that was decoded.
        source: SHA-256 of its file.
    """

    id: int
    tokens: np.ndarray
    arrays: dict[str, np.ndarray]
    grid: tuple[int, int]
    size: tuple[int, int]
    source: str

    @property
    def num_placeholders(self) -> int:
        return int(np.count_nonzero(self.tokens == self.id))

    @property
    def digest(self) -> str:
        """SHA-256 of its arrays, its grid, and its tokens in a prompt without its own id."""
        state = hashlib.sha256(np.where(self.tokens == self.id, -1, self.tokens).astype("<i4").tobytes())
        state.update(repr(tuple(self.grid)).encode())
        for name, array in sorted(self.arrays.items()):
            state.update(f"{name} {array.dtype} {array.shape}\n".encode())
            state.update(np.ascontiguousarray(array).tobytes())
        return state.hexdigest()

    @property
    def label(self) -> str:
        """Text that shows it to people, such as "<image 640x480 3f2a9c01>"."""
        return f"<image {self.size[0]}x{self.size[1]} {self.source[:8]}>"


class ImageStore:
    """A folder of images by their ids. One process adds; all read."""

    def __init__(self, folder: str | Path, *, run: str = "", most_bytes: int = 0) -> None:
        """
        Args:
            run: name under which images are noted that are added or found by their source; empty notes nothing.
            most_bytes: of all files; to make room, those that were not used for an hour are removed. 0 is no bound.
        """
        self.folder = Path(folder)
        self._most_bytes = most_bytes
        self._lock = threading.RLock()
        self._notes = self.folder / f"{run}{NOTES}" if run else None
        self._noted: set[int] | None = None
        self._kept: OrderedDict[int, StoredImage] = OrderedDict()

    def add(
        self, tokens: np.ndarray, arrays: dict[str, np.ndarray], *, grid: tuple[int, int], size: tuple[int, int], source: str,
        picture: bytes = b"",
    ) -> StoredImage:
        """Store an image, unless it is stored already.

        Args:
            tokens: [P] int, with -1 at its placeholders.
            picture: a small PNG of it for people; it is no part of what the hash covers.

        Raises:
            StorageError: the folder cannot be written.
            BusyError: there is no room in `most_bytes`.
        """
        image = StoredImage(-1, np.asarray(tokens, np.int32), arrays, grid, size, source)
        digest = image.digest
        for probe in range(_MOST_PROBES):
            own = _id_of(digest, probe)
            image = StoredImage(own, np.where(tokens == -1, own, tokens).astype(np.int32), arrays, grid, size, source)
            path = self._path(own)
            if path.exists() and self.get(own).digest != digest:
                continue
            if not path.exists():
                self._put(path, wire.encode(image))
            if picture and not (shown := self.folder / f"{own}{PICTURE}").exists():
                self._put(shown, picture)
            self._note_use(own)
            return self._keep(image)
        raise StorageError(f"{self.folder} has {_MOST_PROBES} other images under the ids of this one; begin a new run.dir")

    def get(self, image_id: int) -> StoredImage:
        """Return an image by its id; raises DataError if it is not here, or its pixel values are not those of its id."""
        with self._lock:
            if (known := self._kept.get(image_id)) is not None:
                self._kept.move_to_end(image_id)
                return known
        path = self._path(image_id)
        try:
            image = wire.decode(StoredImage, path.read_bytes())
        except OSError as exc:
            raise DataError(
                f"image {image_id} is not in {self.folder} ({exc.strerror}); the processes of a run with images share its folder") from exc
        if image.id != image_id or image_id not in (_id_of(image.digest, probe) for probe in range(_MOST_PROBES)):
            raise DataError(
                f"{path} holds other pixel values than those that its id stands for, so it would not be what was sampled with; delete"
                " the file, and the run makes it again from the data")
        return self._keep(image)

    def find_source(self, key: str) -> StoredImage | None:
        """Return the image that was made of a source, which `note_source` has noted; None if there is none."""
        try:
            image = self.get(int((self.folder / f"{key}{_SOURCE}").read_text()))
        except (OSError, ValueError, DataError):
            return None
        self._note_use(image.id)
        return image

    def is_stored(self, image_id: int) -> bool:
        """Return whether an image is here, and note that it is used; raises StorageError."""
        if not self._path(image_id).exists():
            return False
        self._note_use(image_id)
        return True

    def note_source(self, key: str, image: StoredImage) -> None:
        """Note which image was made of a source; raises StorageError."""
        self._put(self.folder / f"{key}{_SOURCE}", str(image.id).encode())

    def _note_use(self, image_id: int) -> None:
        """Note that the run uses an image, so that it is not pruned; raises StorageError."""
        if self._most_bytes:
            with suppress(OSError):
                os.utime(self._path(image_id))
        if self._notes is None:
            return
        if self._noted is None:
            self._noted = read_notes(self._notes)
            with suppress(OSError):
                self._notes.touch()  # a run that begins counts as one, though its folder may be gone, and all of its images noted
        if image_id not in self._noted:
            try:
                with self._notes.open("a") as file:
                    file.write(f"{image_id}\n")
            except OSError as exc:
                raise StorageError(f"{self._notes} could not be written: {exc.strerror}; free space or set run.dir") from exc
            self._noted.add(image_id)

    def _put(self, path: Path, data: bytes) -> None:
        if self._most_bytes:
            make_room(self.folder, self._most_bytes - len(data))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path, concurrent=True) as file:
                file.write(data)
        except OSError as exc:
            raise StorageError(f"an image could not be written to {path}: {exc.strerror}; free space or set run.dir") from exc

    def _keep(self, image: StoredImage) -> StoredImage:
        with self._lock:
            self._kept[image.id] = image
            while len(self._kept) > 1 and sum(array.nbytes for kept in self._kept.values() for array in kept.arrays.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return image

    def _path(self, image_id: int) -> Path:
        return self.folder / f"{image_id}{SUFFIX}"


def make_room(folder: Path, most_bytes: int) -> None:
    """Remove the files of images that were not used for an hour, the oldest first, until those of a folder have at most `most_bytes`.

    Raises BusyError if those that were used in the last hour have more.
    """
    try:
        files = sorted((stat.st_mtime, stat.st_size, Path(entry)) for entry in os.scandir(folder) for stat in [entry.stat()])
    except OSError:  # nothing is stored yet
        return
    rest, oldest = sum(size for _, size, _ in files), time.time() - _UNUSED_S
    for used, size, path in files:
        if rest <= most_bytes:
            return
        if used > oldest:
            raise BusyError("there is no room for another image: those of the last hour fill what may be stored; send it again later")
        with suppress(OSError):
            path.unlink()
            rest -= size


def find_pictures(run_dir: Path, tokens: Sequence[int] | np.ndarray) -> dict[int, Path]:
    """Return the files of small pictures of the images in a sequence [L] of ids, by id in order; without those that have none."""
    ids = dict.fromkeys(int(token) for token in tokens if token >= FIRST_ID)
    paths = {each: images_folder(run_dir) / f"{each}{PICTURE}" for each in ids}
    return {each: path for each, path in paths.items() if path.is_file()}


def read_notes(path: Path) -> set[int]:
    """Return the ids of images that a run has noted; a line without an end is left out."""
    try:
        return {int(line) for line in path.read_text().splitlines() if line.isdecimal() and int(line) >= FIRST_ID}
    except FileNotFoundError:
        return set()


def images_folder(run_dir: Path) -> Path:
    """Return the folder of the images of a run: beside it, for all runs there, as a run's own folder may be moved."""
    return run_dir.absolute().parent / ".images"


def link_images(folder: Path, *, into: Path) -> None:
    """Make a folder of links to another's images, so that a store in it has them and writes none; raises StorageError if that fails."""
    try:
        into.mkdir(parents=True, exist_ok=True)
        for entry in os.scandir(folder) if folder.is_dir() else ():
            if entry.name.endswith((SUFFIX, PICTURE, _SOURCE)):
                (into / entry.name).symlink_to(Path(entry).absolute())
    except OSError as exc:
        raise StorageError(f"images could not be linked into {into}: {exc.strerror}; free space or give another folder") from exc


def is_image(tokens: np.ndarray) -> np.ndarray:
    """Return which tokens, an array of any shape, are placeholders of stored images: an array of bool of that shape."""
    return tokens >= FIRST_ID


def find_images(tokens: np.ndarray, store: ImageStore, *, cut: bool = False) -> list[tuple[StoredImage, np.ndarray]]:
    """Return the images in a sequence [L] int, in order, each with the positions of its placeholders, [P] int64.

    With `cut`, the sequence may end within an image, which then has fewer placeholders. Raises DataError if an image has too few or too
    many, or cannot be read.
    """
    places, found = np.flatnonzero(is_image(tokens)), []
    start = 0
    while start < len(places):
        image = store.get(int(tokens[places[start]]))
        own = places[start : start + image.num_placeholders]
        short = len(own) < image.num_placeholders
        if (short and not cut) or (tokens[own] != image.id).any() or not _stands(tokens, own, image):
            raise DataError(
                f"a sequence has {int((tokens[own] == image.id).sum())} placeholders in a row of image {image.id}, which has"
                f" {image.num_placeholders} with other tokens between them; give the prompt as it was made")
        found.append((image, own))
        start += len(own)
    return found


def _stands(tokens: np.ndarray, own: np.ndarray, image: StoredImage) -> bool:
    """Whether the tokens from the first placeholder to the last are those of the image."""
    inner = np.flatnonzero(image.tokens == image.id)
    return np.array_equal(tokens[own[0] : own[-1] + 1], image.tokens[inner[0] : inner[len(own) - 1] + 1])


def _id_of(digest: str, probe: int) -> int:
    return FIRST_ID + (int(digest[:12], 16) + probe) % (FIRST_ID - 1)


def image_positions(length: int, images: Sequence[tuple[StoredImage, np.ndarray]], *, first: int = 0) -> np.ndarray:
    """Return rotary positions of time, height and width, [3, L] int64, of L tokens from `first` on, whose images stand in one piece each.

    Text counts on by 1 in all three. An image's placeholders have the time of its beginning, and count rows and columns from there; text
    goes on after the larger of the two. Source: Qwen2-VL, arXiv:2409.12191.
    """
    positions, at, done = np.empty((3, length), np.int64), first, 0
    for image, places in images:
        start, stop = int(places[0]), int(places[-1]) + 1
        positions[:, done:start] = at + np.arange(start - done)
        at += start - done
        rows, columns = image.grid
        positions[:, start:stop] = at + np.stack([
            np.zeros(rows * columns, np.int64), np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows)])[:, : stop - start]
        at += max(rows, columns)
        done = stop
    positions[:, done:] = at + np.arange(length - done)
    return positions
