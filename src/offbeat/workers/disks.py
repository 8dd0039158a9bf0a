"""Folders that travel between machines without a shared disk: in pieces, with their checksums, and put in place whole. Torch-free.

A `Disk` is a folder in which folders that travel have their places: `NearDisk` on this machine, `FarDisk` on a worker's machine, where a
`DiskService` answers. `collect` copies a folder from any disks to another one: sources list their files with sizes and checksums, pieces
are appended to files in a staging folder beside the destination, and when all have come, the staging folder is read again, compared with
the lists, and renamed. So a folder appears complete or not at all, and at most `_FILES_AT_ONCE` pieces of each copy are in memory.
"""

import asyncio
import fcntl
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from offbeat.aio import deadline, gather_all
from offbeat.data import wire
from offbeat.disk import discard, put_in_place, sha256, sync
from offbeat.errors import OffbeatError, StorageError
from offbeat.workers.worker import Far, Nothing, WorkerService

T = TypeVar("T")

PIECE_BYTES = 8 << 20
_FILES_AT_ONCE = 4
_ABANDON_S = 5.0
_PARENT_DIGITS = 16
_SCRATCH = "offbeat-files-"
_FRESH_S = 60.0
"""A folder this young may belong to a process that has not locked it yet."""
_locks: dict[Path, int] = {}
"""Descriptors of the folders that this process has opened; a lock ends with them."""


@dataclass(frozen=True)
class DiskFolder:
    """A folder by its place on a disk, one or more names with "/" between them; of its files those whose names fit `only`, if it is given.

    For example, `only` may be ("config.json", "tokenizer*").
    """

    place: str
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileInfo:
    """A file of a folder, by its name there, with "/" between names where it lies deeper; `sha256` has hexadecimal digits."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Listing:
    """The files of a folder, in the order of their names."""

    files: tuple[FileInfo, ...]


@dataclass(frozen=True)
class ReadPiece:
    """Asks for the bytes of a file from `offset` on, at most `PIECE_BYTES`."""

    place: str
    name: str
    offset: int


@dataclass(frozen=True)
class FilePiece:
    """Consecutive bytes of a file."""

    data: bytes


@dataclass(frozen=True)
class WritePiece:
    """Appends to a file of a folder that is arriving, which has `offset` bytes so far."""

    place: str
    name: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class FolderFound:
    """Whether there is such a folder."""

    exists: bool


@dataclass(frozen=True)
class Settle:
    """Ends the arrival of a folder, which must have these files; they `merge` with the folder that is there, or take its place."""

    place: str
    files: tuple[FileInfo, ...]
    merge: bool = False


class DiskService(WorkerService):
    """Answers for the folders below `root`. All methods raise StorageError: the disk fails, or a name leads out of its folder."""

    def __init__(self, root: Path, *, durable: bool) -> None:
        """`durable` says whether an arrived folder must survive a power cut."""
        self._root = root
        self._durable = durable

    def handle(self, method: str, payload: bytes) -> bytes:
        try:
            return super().handle(method, payload)
        except OSError as exc:
            raise exc if isinstance(exc, OffbeatError) else _failed(exc) from exc

    def list_files(self, request: DiskFolder) -> Listing:
        """List a folder; one that does not exist has no files. Reads all of it for the checksums."""
        folder = below(self._root, request.place)
        paths = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
        chosen = [path for path in paths if not request.only or any(fnmatch(path.name, pattern) for pattern in request.only)]
        return Listing(tuple(
            FileInfo(path.relative_to(folder).as_posix(), path.stat().st_size, digest)
            for path, digest in zip(chosen, _digests(chosen), strict=True)))

    def has(self, request: DiskFolder) -> FolderFound:
        """Tell whether there is a folder; one that is arriving is not there yet."""
        return FolderFound(below(self._root, request.place).is_dir())

    def read(self, request: ReadPiece) -> FilePiece:
        """Read a piece of a file; it is empty at the end."""
        with below(below(self._root, request.place), request.name).open("rb") as file:
            file.seek(request.offset)
            return FilePiece(file.read(PIECE_BYTES))

    def begin_arrival(self, request: DiskFolder) -> Nothing:
        """Begin the arrival of a folder, or begin it anew."""
        staging = _staging(below(self._root, request.place))
        discard(staging)
        staging.mkdir(parents=True)
        return Nothing()

    def write(self, request: WritePiece) -> Nothing:
        """Append a piece to a file of a folder that is arriving."""
        path = below(_staging(below(self._root, request.place)), request.name)
        if request.offset == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
        how = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if request.offset == 0 else 0)
        with os.fdopen(os.open(path, how, 0o666), "ab") as file:
            if (size := os.fstat(file.fileno()).st_size) != request.offset:
                raise StorageError(f"{path} has {size} bytes where its next piece begins at {request.offset}; two senders write to it")
            file.write(request.data)
        return Nothing()

    def settle(self, request: Settle) -> Nothing:
        """Put a folder that has arrived in its place, once its files are known to have the bytes that were sent."""
        folder = below(self._root, request.place)
        staging = _staging(folder)
        try:
            paths = [below(staging, info.name) for info in request.files]
            for info, path, digest in zip(request.files, paths, _digests(paths), strict=True):
                if path.stat().st_size != info.num_bytes or digest != info.sha256:
                    raise StorageError(f"{info.name} of {folder} has come with other bytes than were sent; nothing was put in place")
                if self._durable:
                    sync(path)
            if request.merge:
                _merge(staging, folder, [info.name for info in request.files])
            else:
                put_in_place(staging, folder)
        finally:
            discard(staging)
        if self._durable:
            sync(folder.parent)
        return Nothing()

    def abandon(self, request: DiskFolder) -> Nothing:
        """Remove the arrived part of a folder; the folder itself stays as it was."""
        discard(_staging(below(self._root, request.place)))
        return Nothing()

    def remove(self, request: DiskFolder) -> Nothing:
        """Remove a folder, which may be gone already."""
        discard(below(self._root, request.place))
        return Nothing()


class Disk(Protocol):
    """A disk whose `DiskService` can be asked."""

    @property
    def name(self) -> str:
        """Name of the machine; disks of one name are one disk."""
        ...

    async def ask(self, method: str, request: Any, reply: type[T], *, timeout_s: float) -> T:
        """Call a method of the `DiskService`. Raises StorageError, and if the machine is far away, WorkerError and DeadlineError."""
        ...


class NearDisk:
    """The `Disk` of a folder of this machine."""

    name = "this machine"

    def __init__(self, root: Path) -> None:
        self._service = DiskService(root, durable=True)

    async def ask(self, method: str, request: Any, reply: type[T], *, timeout_s: float) -> T:  # noqa: ARG002 (a local disk has no deadline)
        try:
            return await asyncio.to_thread(getattr(self._service, method), request)
        except OSError as exc:
            raise exc if isinstance(exc, OffbeatError) else _failed(exc) from exc


class FarDisk:
    """The `Disk` of a folder on the machine of a worker, reached through that worker's host."""

    def __init__(self, name: str, root: str, call: Callable[[str, bytes, float], Awaitable[bytes]]) -> None:
        """`root` is the folder's path on that machine; `call(method, payload, timeout_s)` calls the `DiskService` there."""
        self.name = name
        self._root = PurePosixPath(root)
        self._call = call

    async def ask(self, method: str, request: Any, reply: type[T], *, timeout_s: float) -> T:
        return wire.decode(reply, await self._call(method, wire.encode(request), timeout_s))

    def path(self, place: str) -> str:
        return str(self._root / place)


def open_scratch(parent: Path, name: str) -> Path:
    """Make a folder for files that travel, shared under its name, and remove those of dead processes; raises StorageError if it cannot."""
    folder = parent / f"{_SCRATCH}{name}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _locks[folder] = _lock(folder, fcntl.LOCK_SH)
    except OSError as exc:
        raise StorageError(
            f"files cannot travel through {folder}: {exc.strerror}; set cluster.scratch_dir to a folder that every machine can write"
        ) from exc
    for other in parent.glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # it is another user's, in use, or being removed
            if other != folder and time.time() - other.stat().st_mtime > _FRESH_S:
                os.close(_lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB))
                discard(other)
    return folder


def _lock(folder: Path, how: int) -> int:
    """Lock a folder, until the descriptor is closed or the process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def below(root: Path, name: str) -> Path:
    """Return the path of a name below a folder; raises StorageError if the name is empty, or would lead somewhere else."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise StorageError(f"{name[:200]!r} is not the name of a file in a folder that travels; names are relative, without '.' and '..'")
    return root.joinpath(*parts)


def place_of(folder: Path) -> str:
    """Return the place of a folder on far disks, such as "3f0c9a2b71d4e856/step-00000050"; a hash of its parent comes first."""
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 (links are kept: the names are what engines and ranks know)
    return f"{hashlib.sha256(str(folder.parent).encode()).hexdigest()[:_PARENT_DIGITS]}/{folder.name}"


async def send(folder: Path, disk: Far, *, timeout_s: float, only: tuple[str, ...] = ()) -> int:
    """Copy a folder of this machine to its place on a far disk; see `collect`."""
    what = f"{folder.name} to reach {disk.name}"
    return await collect([NearDisk(folder.parent)], DiskFolder(folder.name, only), disk, place_of(folder), what=what, timeout_s=timeout_s)


async def fetch(folder: Path, disks: Sequence[Far], *, merge: bool = False, timeout_s: float) -> int:
    """Copy the parts of a folder on far disks to this machine; see `collect`."""
    what = f"{folder.name} to come from {', '.join(disk.name for disk in disks)}"
    return await collect(
        disks, DiskFolder(place_of(folder)), NearDisk(folder.parent), folder.name, merge=merge, what=what, timeout_s=timeout_s)


async def collect(
    sources: Sequence[Disk], place: DiskFolder, target: Disk, to: str, *, merge: bool = False, what: str, timeout_s: float,
) -> int:
    """Copy one folder, in parts from any number of sources, to another disk, where it appears complete or not at all.

    Args:
        place: place of the folder on the sources, and patterns of its files.
        merge: whether the files are added to the folder that is there; otherwise they take its place.
        what: name of the wait in errors, such as "step-00000050 to reach node 4f1c09a2b37d".

    Returns:
        Number of files that were copied; where there are none, nothing has changed.

    Raises:
        StorageError: a disk fails, a file has not come as it was sent, or two sources have one file of the same name.
        WorkerError, DeathError: a machine is gone. DeadlineError: it took too long.
    """
    async with deadline(what, timeout_s):
        listings = await gather_all(source.ask("list_files", place, Listing, timeout_s=timeout_s) for source in sources)
        origins: dict[str, Disk] = {}
        files: list[FileInfo] = []
        for source, listing in zip(sources, listings, strict=True):
            for info in listing.files:
                if info.name in origins:
                    raise StorageError(f"{origins[info.name].name} and {source.name} both have {info.name} of {to}; each may have its own")
                origins[info.name] = source
                files.append(info)
        if not files:
            return 0
        at_once = asyncio.Semaphore(_FILES_AT_ONCE)

        async def copy(info: FileInfo) -> None:
            async with at_once:
                await _copy(info, origins[info.name], place.place, target, to, timeout_s=timeout_s)

        try:
            await target.ask("begin_arrival", DiskFolder(to), Nothing, timeout_s=timeout_s)
            await gather_all(copy(info) for info in files)
            await target.ask("settle", Settle(to, tuple(files), merge), Nothing, timeout_s=timeout_s)
        except BaseException:
            with suppress(OffbeatError):  # a machine that is gone keeps nothing, and the next arrival begins anew
                await target.ask("abandon", DiskFolder(to), Nothing, timeout_s=_ABANDON_S)
            raise
    return len(files)


async def _copy(info: FileInfo, source: Disk, place: str, target: Disk, to: str, *, timeout_s: float) -> None:
    offset = 0
    while True:
        piece = await source.ask("read", ReadPiece(place, info.name, offset), FilePiece, timeout_s=timeout_s)
        if piece.data or not offset:  # a file without bytes is written, too
            await target.ask("write", WritePiece(to, info.name, offset, piece.data), Nothing, timeout_s=timeout_s)
        offset += len(piece.data)
        if not piece.data or offset >= info.num_bytes:  # one that has grown since it was listed has another checksum
            return


def _digests(paths: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return list(pool.map(sha256, paths))


def _staging(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.arriving")


def _merge(staging: Path, folder: Path, names: Sequence[str]) -> None:
    for name in names:
        path = below(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        below(staging, name).replace(path)


def _failed(exc: OSError) -> StorageError:
    return StorageError(f"{exc.filename or 'a disk'} could not be read or written: {exc.strerror or exc}; free space, or give another"
                        " folder: run.dir, or cluster.scratch_dir on the machines of workers")
