"""Answers of ended requests on disk: append-only files of records with checksums. The database knows where each answer is.

One thread writes, and any thread reads. Every start begins a new file, and so does a full one; nothing is ever appended after a part
that a crash tore off. Files that are no longer needed are deleted as a whole. A record with a wrong checksum is refused.

Records are not synced: a power cut may lose the last half minute of answers, whose requests the database still lists as ended. No file
number is used twice, even if its file is lost, because such a request could otherwise be given another one's answer.
"""

import os
import re
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from offbeat.disk import make_folder, sync
from offbeat.errors import StorageError

_HEADER = struct.Struct("<QI")  # length and CRC-32 of the data that follows
_FILE = re.compile(r"(\d{8})\.results")


class Location(NamedTuple):
    """Place of a record: number of its file, offset of its header and size of its data in bytes, such as (3, 4096, 120)."""

    segment: int
    start: int
    length: int


class Results:
    """A folder of record files with one writer and any number of readers; `active` is the number of the file that grows."""

    def __init__(self, folder: Path, *, after: int = 0, segment_bytes: int = 64 * 2**20) -> None:
        """Open or create the folder, and begin a file; raises StorageError if it cannot be written.

        Args:
            after: last file number in the database; the file itself may be lost.
            segment_bytes: a file larger than this is followed by another.
        """
        self._folder = folder
        self._segment_bytes = segment_bytes
        try:
            make_folder(folder)
            self._begin(max(after, *self._segments(), 0) + 1)
        except OSError as exc:
            raise StorageError(f"results cannot be written to {folder}: {exc.strerror}; free space or choose another folder") from exc

    def append(self, data: bytes) -> Location:
        """Append a record; raises StorageError, with everything before it intact, if the disk is full or fails."""
        try:
            if self._end > self._segment_bytes:
                full = self._fd
                self._begin(self.active + 1)  # first, because closing a descriptor twice might close one that was reused
                os.close(full)
            rest = memoryview(_HEADER.pack(len(data), zlib.crc32(data)) + data)
            end = self._end
            while rest:
                written = os.pwrite(self._fd, rest, end)
                end, rest = end + written, rest[written:]
        except OSError as exc:
            raise StorageError(f"a result cannot be written to {self._folder}: {exc.strerror}; free space") from exc
        location = Location(self.active, self._end, len(data))
        self._end = end  # only now, so that the rest of a failed write is overwritten
        return location

    def read(self, location: Location) -> bytes:
        """Return the data of a record; raises StorageError if the record is missing, or its checksum is wrong."""
        path = self._path(location.segment)
        try:
            with path.open("rb") as file:
                file.seek(location.start)
                record = file.read(_HEADER.size + location.length)
        except OSError as exc:
            raise StorageError(f"the result at {location.start} of {path} cannot be read: {exc.strerror}") from exc
        data = record[_HEADER.size:]
        if record[: _HEADER.size] != _HEADER.pack(location.length, zlib.crc32(data)):
            raise StorageError(f"the result at {location.start} of {path} is damaged: its checksum does not match")
        return data

    def delete_before(self, segment: int) -> None:
        """Delete the files with numbers below `segment`, except the one that grows."""
        for number in self._segments():
            if number < min(segment, self.active):
                self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file that grows; nothing more is written."""
        os.close(self._fd)

    def _begin(self, segment: int) -> None:
        self._fd = os.open(self._path(segment), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.active = segment
        self._end = 0
        sync(self._folder)

    def _segments(self) -> list[int]:
        return [int(match[1]) for path in self._folder.iterdir() if (match := _FILE.fullmatch(path.name))]

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}.results"
