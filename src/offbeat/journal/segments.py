"""The files of a journal, such as `journal/00000007.log`: numbered records with checksums. Read here; `writer` appends to them.

A segment begins with a header and holds records in order. Records are numbered on from one segment to the next, so that none is missed;
each process that writes begins with a higher number. All that is read is a prefix of all that was written: reading ends at the first record
that is not as it was written, which after a kill is the one that it cut off. A segment that was begun at a checkpoint has its step in the
header (`base`); segments before it serve older checkpoints alone.

    header  8 bytes b"OFFBEATJ", format, CRC-32 of both | number, base, first record's number, CRC-32 of all three
    record  CRC-32 of the rest, length of the payload, record's number, payload

Integers are little-endian; a base of -1 is none.
"""

import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ConfigError, StorageError

FORMAT = 2
"""Version of the files. It rises with a change that an older Offbeat would misread; the first 16 bytes stay as they are.

Since format 2, answers of engines may have samples that are not finished; an Offbeat that knows format 1 would take them for whole ones.
"""

_OLDEST = 1

MAGIC = b"OFFBEATJ"

_NAME = re.compile(r"(\d{8,})\.log")
_START = struct.Struct("<8sII")
_ABOUT = struct.Struct("<QqQI")
_FRAME = struct.Struct("<IQQ")

_PROCESS_BITS = 32
"""Bits of a record's number that count the records of one process; those above are the number of its first segment."""

HEADER_BYTES = _START.size + _ABOUT.size
FRAME_BYTES = _FRAME.size


@dataclass(frozen=True)
class Segment:
    """A file of a journal.

    Attributes:
        number: position among the segments.
        base: step of the checkpoint at which it was begun; None if it only continues the one before.
        first: number of its first record.
    """

    path: Path
    number: int
    base: int | None
    first: int


@dataclass(frozen=True)
class RecordPlace:
    """Where a payload lies: `length` bytes from `offset` on."""

    path: Path
    offset: int
    length: int

    def read(self) -> bytes:
        """Read the payload again; raises StorageError if it cannot be read."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return file.read(self.length)
        except OSError as exc:
            raise StorageError(f"cannot read {self.path}: {exc.strerror}") from exc


@dataclass(frozen=True)
class Stored:
    """A record as it was found."""

    place: RecordPlace
    payload: bytes


@dataclass(frozen=True)
class Cut:
    """Where reading ended before the end of the files.

    Attributes:
        reason: the damage, as a sentence without a full stop.
        torn: whether a kill explains it: the last record is cut off, or another process has begun the journal anew.
    """

    reason: str
    torn: bool


def path_of(folder: Path, number: int) -> Path:
    """Return the path of a segment."""
    return folder / f"{number:08d}.log"


def header(number: int, *, base: int | None, first: int) -> bytes:
    """Build the header of a segment; see `Segment`."""
    start = MAGIC + struct.pack("<I", FORMAT)
    about = struct.pack("<QqQ", number, -1 if base is None else base, first)
    return start + _crc(start) + about + _crc(about)


def frame(number: int, payload: bytes) -> bytes:
    """Return the bytes that precede a record's payload."""
    rest = struct.pack("<QQ", len(payload), number)
    return _crc(rest, payload) + rest


def first_of_process(number: int) -> int:
    """Return a number for the first record of a process that begins to write with this segment: above those of all before it."""
    return number << _PROCESS_BITS


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the segments in a folder, whatever they hold, ascending; other files are not looked at."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(match[1]) for path in paths if (match := _NAME.fullmatch(path.name)))


def find(folder: Path) -> list[Segment]:
    """Return the segments of a folder in order, without those whose header is not as it was written.

    Raises:
        ConfigError: a newer Offbeat has written one, in a format that this one does not know.
        StorageError: one cannot be read.
    """
    found = (_segment(path_of(folder, number), number) for number in numbers(folder))
    return [each for each in found if isinstance(each, Segment)]


class Reader:
    """Reads the records of segments in order; `cut` is then why that ended before the end of the files, None if it did not."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """`segments` are consecutive ones, from the one to begin with to the last."""
        self.cut: Cut | None = None
        self._segments = segments

    def __iter__(self) -> Iterator[Stored]:
        following = self._segments[0].first if self._segments else 0
        broken: Cut | None = None
        number = -1
        for segment in self._segments:
            if segment.first != following:
                anew = segment.first >> _PROCESS_BITS == segment.number == number + 1
                self.cut = broken or Cut(f"{segment.path.name} begins with record {segment.first} instead of {following}", torn=anew)
                return
            broken, number = None, segment.number
            try:
                with segment.path.open("rb") as file:
                    size, offset = segment.path.stat().st_size, file.seek(HEADER_BYTES)
                    while offset < size:
                        start = file.read(FRAME_BYTES)
                        length = _FRAME.unpack(start)[1] if len(start) == FRAME_BYTES else 0
                        payload = file.read(length) if offset + FRAME_BYTES + length <= size else b""
                        if frame(following, payload) != start:
                            is_short = len(start) < FRAME_BYTES or offset + FRAME_BYTES + length > size
                            broken = Cut(f"{segment.path.name} is not as it was written from byte {offset} of {size} on", torn=is_short)
                            break
                        yield Stored(RecordPlace(segment.path, offset + FRAME_BYTES, length), payload)
                        following, offset = following + 1, offset + FRAME_BYTES + length
            except OSError as exc:
                raise StorageError(f"cannot read {segment.path}: {exc.strerror}") from exc
        self.cut = broken


def _segment(path: Path, number: int) -> Segment | None:
    try:
        with path.open("rb") as file:
            start, about = file.read(_START.size), file.read(_ABOUT.size)
    except OSError as exc:
        raise StorageError(f"cannot read {path}: {exc.strerror}") from exc
    if len(start) < _START.size or start[:8] != MAGIC or _crc(start[:12]) != start[12:]:
        return None
    if not _OLDEST <= (version := _START.unpack(start)[1]) <= FORMAT:
        raise ConfigError(
            f"{path} has format {version}, made by a newer Offbeat than this one, which knows up to {FORMAT}; upgrade Offbeat, or remove"
            f" the folder {path.parent} to continue from the checkpoint alone")
    if len(about) < _ABOUT.size or _crc(about[:-4]) != about[-4:]:
        return None
    own, base, first, _ = _ABOUT.unpack(about)
    return Segment(path, number, None if base < 0 else base, first) if own == number else None


def _crc(*parts: bytes) -> bytes:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return struct.pack("<I", value)
