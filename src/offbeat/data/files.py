"""Data files by their suffix: JSON lines, JSON, CSV, TSV and Parquet, the first four also compressed. Called by `data.sources`.

An uncompressed file of JSON lines is read record by record, with the offsets of its lines in memory. CSV, a JSON array and compressed files
are held in memory, Parquet as an Arrow table.
"""

import csv
import gzip
import importlib
import io
import lzma
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zstandard

from offbeat.data.cells import decode_record, decode_records, of_table
from offbeat.data.messages import without_filled_nulls
from offbeat.errors import DataError, MissingExtraError, first_line

Check = Callable[[dict[str, Any], str], object]
"""Called with a record and its location; raises DataError if the record cannot be used."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TABLE_CHUNK = 1024
_LARGEST_FIELD = 2**31 - 1
"""Characters of one field of a CSV file; the module's own bound is 131072, which is less than some texts have."""

_NAMES: dict[str, str] = {}
"""A program's names of its rows, such as "data", by the file of JSON lines that holds them."""


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Name rows in messages during the body by the program's names, by file, e.g. "data, row 3" for line 3 of its file."""
    _NAMES.update(names)
    try:
        yield
    finally:
        for path in names:
            _NAMES.pop(path, None)


def name_of(path: str) -> str:
    """Return the name of a source of data for messages."""
    return _NAMES.get(path) or repr(path)


def _line(path: Path, number: int) -> str:
    return f"{_NAMES[str(path)]}, row {number}" if str(path) in _NAMES else f"{str(path)!r}, line {number}"


class Source(Protocol):
    """A source of raw records that are read by index."""

    def __len__(self) -> int: ...

    def record(self, index: int) -> dict[str, Any]:
        """Return the record at `index`, 0 <= index < len."""
        ...

    def where(self, index: int) -> str:
        """Name the record at `index` in messages: its file and its line or row, e.g. "'train.jsonl', line 3"."""
        ...


@dataclass(eq=False)
class Sieve:
    """Lets through the records that can be used, and counts the others.

    Attributes:
        most_refused: number of records that may be refused; the next one is an error.
        limit: number of records after which a source need not look further; None for all.
        refused: the reason for each refused record.
    """

    check: Check
    most_refused: int = 0
    limit: int | None = None
    refused: list[str] = field(default_factory=list)
    num_passed: int = 0

    @property
    def is_full(self) -> bool:
        """Whether `limit` records have been looked at."""
        return self.limit is not None and self.num_passed + len(self.refused) >= self.limit

    def passes(self, record: dict[str, Any], where: str) -> bool:
        """Return whether a record can be used. Raises as `refuse`."""
        try:
            self.check(record, where)
        except DataError as exc:
            self.refuse(exc)
            return False
        self.num_passed += 1
        return True

    def refuse(self, why: DataError) -> None:
        """Count a record that cannot be used; raises DataError beyond `most_refused`, the given error itself where that is 0."""
        self.refused.append(str(why))
        if len(self.refused) <= self.most_refused:
            return
        if not self.most_refused:
            raise why
        raise DataError(
            f"{len(self.refused)} rows cannot be used, allowed are data.max_unusable_rows = {self.most_refused}; mend them or raise it. The"
            f" first: {self.refused[0]}") from why


@dataclass(frozen=True, eq=False)
class JsonLines:
    """One JSON object per line; blank lines do not count.

    Attributes:
        offsets: first byte of each record, such as [0, 41].
        lines: number of each record's line, from 1.
        text: content of a compressed file; None for one that is read where needed.
    """

    path: Path
    offsets: "array[int]"
    lines: "array[int]"
    text: bytes | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    def record(self, index: int) -> dict[str, Any]:
        """Read a record; raises DataError if the file has been changed during the run."""
        try:
            with self.path.open("rb") if self.text is None else io.BytesIO(self.text) as file:
                file.seek(self.offsets[index])
                return msgspec.convert(decode_record(file.readline().removeprefix(_BYTE_ORDER_MARK)), dict)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise DataError(
                f"{str(self.path)!r} was changed while the run reads it: its record {index} can no longer be read ({first_line(exc)});"
                " bring it back as it was and start the run again") from exc

    def where(self, index: int) -> str:
        return _line(self.path, self.lines[index])


@dataclass(frozen=True, eq=False)
class Records:
    """Records in memory, each with its place, as in "line 3"."""

    path: Path
    records: list[dict[str, Any]]
    places: list[str]

    def __len__(self) -> int:
        return len(self.records)

    def record(self, index: int) -> dict[str, Any]:
        return self.records[index]

    def where(self, index: int) -> str:
        return f"{str(self.path)!r}, {self.places[index]}"


@dataclass(frozen=True, eq=False)
class Table:
    """Records in a `pyarrow.Table`; `rows` are the indices of those that can be used."""

    table: Any
    name: str
    rows: "array[int]"

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, index: int) -> dict[str, Any]:
        return without_filled_nulls(of_table(self.table.slice(self.rows[index], 1).to_pylist()[0], self.table.schema))

    def where(self, index: int) -> str:
        return f"{self.name!r}, row {self.rows[index]}"


def is_data_file(path: Path) -> bool:
    """Whether a file's name ends as those that can be read."""
    return _reader_of(path) is not None


def open_file(path: Path, sieve: Sieve) -> Source:
    """Open a file by its suffix.

    Raises:
        DataError: the suffix is not known, the file cannot be read, or more records cannot be used than the sieve allows.
        MissingExtraError: `pyarrow` is needed and not installed.
    """
    reader = _reader_of(path)
    if reader is None:
        raise DataError(f"data file {str(path)!r} must end in {', '.join(_READERS)}; all but .parquet also with {', '.join(_PACKED)}")
    try:
        return reader(path, sieve)
    except (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as exc:
        raise DataError(f"data file {str(path)!r} cannot be read: {first_line(exc)}") from exc


def table_source(table: Any, name: str, sieve: Sieve) -> Table:
    """Return the rows of a `pyarrow.Table` that can be used. Raises as `Sieve.refuse`."""
    used = array("q")
    for start in range(0, table.num_rows, _TABLE_CHUNK):
        for index, record in enumerate(table.slice(start, _TABLE_CHUNK).to_pylist(), start=start):
            if sieve.is_full:
                return Table(table, name, used)
            if sieve.passes(without_filled_nulls(of_table(record, table.schema)), f"{name!r}, row {index}"):
                used.append(index)
    return Table(table, name, used)


def import_extra(module: str, purpose: str, *, extra: str = "hub") -> Any:
    """Import an optional module when it is needed, since it may be missing, and is slow to import.

    Raises MissingExtraError if it is not installed, which says that `purpose` needs it, and that `offbeat[extra]` provides it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise MissingExtraError(f"to {purpose}, {module.partition('.')[0]} must be installed: pip install 'offbeat[{extra}]'") from exc


def _unpacked(path: Path) -> bytes | None:
    """Return the content of a compressed file; None for one that is not compressed."""
    unpack = _PACKED.get(path.suffix.lower())
    return None if unpack is None else unpack(path)


def _unpack_zstd(path: Path) -> bytes:
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as reader:
        return reader.read()


def _open_json_lines(path: Path, sieve: Sieve) -> JsonLines:
    text, offsets, lines, offset = _unpacked(path), array("q"), array("q"), 0
    with path.open("rb") if text is None else io.BytesIO(text) as file:
        for number, line in enumerate(file, start=1):
            if sieve.is_full:
                break
            if line.strip():
                where = _line(path, number)
                record = _decoded(line, where, sieve)
                if record is not None and sieve.passes(record, where):
                    offsets.append(offset)
                    lines.append(number)
            offset += len(line)
    return JsonLines(path, offsets, lines, text)


def _decoded(line: bytes, where: str, sieve: Sieve) -> dict[str, Any] | None:
    """Return the object in a line; None if there is none, which the sieve counts."""
    try:
        record = decode_record(line.removeprefix(_BYTE_ORDER_MARK))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        sieve.refuse(DataError(f"{where}, is not JSON ({exc}); write one JSON object per line"))
        return None
    if not isinstance(record, dict):
        sieve.refuse(DataError(f"{where}, must be a JSON object, got {type(record).__name__}; write one JSON object per line"))
        return None
    return record


def _open_json(path: Path, sieve: Sieve) -> Source:
    """Open a file that holds one JSON array of objects, or one JSON object per line."""
    text = _unpacked(path)
    with path.open("rb") if text is None else io.BytesIO(text) as file:
        if not file.read(4096).removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
            return _open_json_lines(path, sieve)
        file.seek(0)
        try:
            records = decode_records(file.read().removeprefix(_BYTE_ORDER_MARK))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise DataError(
                f"data file {str(path)!r} is not a JSON array of objects ({exc}); write one, or one JSON object per line") from exc
    used = Records(path, [], [])
    for index, record in enumerate(records):
        if sieve.is_full:
            break
        where = f"{str(path)!r}, row {index}"
        if not isinstance(record, dict):
            sieve.refuse(DataError(f"{where}, must be a JSON object, got {type(record).__name__}"))
        elif sieve.passes(record, where):
            used.records.append(record)
            used.places.append(f"row {index}")
    return used


def _open_csv(path: Path, sieve: Sieve) -> Records:
    """Open a file with a header line; all values are text."""
    separator = "\t" if ".tsv" in path.name.lower()[-8:] else ","
    text = _unpacked(path)
    csv.field_size_limit(_LARGEST_FIELD)
    used = Records(path, [], [])
    with path.open("rb") if text is None else io.BytesIO(text) as file:
        reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=separator, strict=True)
        rows = _csv_rows(path, reader)
        header = next(rows, (1, []))[1]
        if not header or not all(header) or len(set(header)) < len(header):
            raise DataError(
                f"data file {str(path)!r} must begin with a line of column names, each once, got {separator.join(header)[:80]!r}")
        for line, row in rows:
            if sieve.is_full:
                break
            where = f"{str(path)!r}, line {line}"
            if len(row) != len(header):
                sieve.refuse(DataError(
                    f"{where}, has {len(row)} fields where the first line names {len(header)} columns; put a field with the separator or a"
                    " line break in it into double quotes"))
            elif sieve.passes(record := dict(zip(header, row, strict=True)), where):
                used.records.append(record)
                used.places.append(f"line {line}")
    return used


def _csv_rows(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the fields of each row that is not blank."""
    line = 1
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except (csv.Error, UnicodeDecodeError) as exc:
            raise DataError(f"data file {str(path)!r} cannot be read at line {line}: {first_line(exc)}; write UTF-8 text as CSV") from exc
        if row:
            yield line, row
        line = reader.line_num + 1


def _open_parquet(path: Path, sieve: Sieve) -> Table:
    parquet = import_extra("pyarrow.parquet", "read Parquet files")
    try:
        table = parquet.ParquetFile(path).read()
    except (OSError, ValueError) as exc:
        raise DataError(f"data file {str(path)!r} is not readable as Parquet: {first_line(exc)}") from exc
    return table_source(table, str(path), sieve)


_READERS: dict[str, Callable[[Path, Sieve], Source]] = {
    ".jsonl": _open_json_lines, ".ndjson": _open_json_lines, ".json": _open_json, ".csv": _open_csv, ".tsv": _open_csv,
    ".parquet": _open_parquet}
_PACKED: dict[str, Callable[[Path], bytes]] = {
    ".gz": lambda path: gzip.decompress(path.read_bytes()), ".zst": _unpack_zstd, ".xz": lambda path: lzma.decompress(path.read_bytes())}


def _reader_of(path: Path) -> Callable[[Path, Sieve], Source] | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _PACKED and suffixes[-2:-1] != [".parquet"]:
        suffixes.pop()
    return _READERS.get(suffixes[-1]) if suffixes else None
