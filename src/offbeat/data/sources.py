"""Raw records by index, from JSON-lines files, Parquet files and hub datasets. `dataset` opens them and makes rows of them.

Every record is passed to a `check` once, when the source is opened, so that a bad row stops a run at its start and not midway. Memory
holds line offsets for JSON lines, and the Arrow table (memory-mapped for hub datasets) otherwise.
"""

import importlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from offbeat.errors import DataError, MissingExtraError, first_line

Check = Callable[[dict[str, Any], str], object]
"""Called with a record and its location; raises DataError if the record cannot be used."""

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TABLE_CHUNK = 1024


class Source(Protocol):
    """A source of raw records that are read by index."""

    def __len__(self) -> int: ...

    def record(self, index: int) -> dict[str, Any]:
        """Return the record at `index`, 0 <= index < len."""
        ...


@dataclass(frozen=True, eq=False)
class JsonLines:
    """One JSON object per line; blank lines do not count."""

    path: Path
    offsets: "array[int]"

    def __len__(self) -> int:
        return len(self.offsets)

    def record(self, index: int) -> dict[str, Any]:
        """Read a record; raises DataError if the file has been changed during the run."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offsets[index])
                return msgspec.json.decode(file.readline().removeprefix(_BYTE_ORDER_MARK), type=dict)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise DataError(
                f"{str(self.path)!r} was changed while the run reads it: its record {index} can no longer be read ({first_line(exc)});"
                " bring it back as it was and start the run again") from exc


@dataclass(frozen=True, eq=False)
class Table:
    """Records in a `pyarrow.Table`."""

    table: Any

    def __len__(self) -> int:
        return self.table.num_rows

    def record(self, index: int) -> dict[str, Any]:
        return self.table.slice(index, 1).to_pylist()[0]


def is_file(path: str) -> bool:
    """Whether `path` names a data file rather than a hub id."""
    return Path(path).suffix in (*_JSON_SUFFIXES, ".parquet") or Path(path).is_file()


def open_source(path: str, *, split: str, check: Check) -> Source:
    """Open a file by its suffix, or a hub id (`org/name`, or `org/name:config` for one of several configurations) through `datasets`.

    Args:
        split: split of a hub dataset; files have none.

    Raises:
        DataError: it does not exist, cannot be read, is empty, or `check` refused a record.
        MissingExtraError: `datasets` or `pyarrow` is needed and not installed.
    """
    if not is_file(path):
        source = _open_hub(path, split=split, check=check)
    elif not Path(path).is_file():
        raise DataError(f"data file {path!r} does not exist; give a .jsonl or .parquet file, or a hub id")
    elif Path(path).suffix in _JSON_SUFFIXES:
        source = _open_json_lines(Path(path), check=check)
    elif Path(path).suffix == ".parquet":
        source = _open_parquet(path, check=check)
    else:
        raise DataError(f"data file {path!r} must end in {', '.join(_JSON_SUFFIXES)} (one JSON object per line) or .parquet")
    if not len(source):
        raise DataError(f"dataset {path!r} has no rows")
    return source


def _open_json_lines(path: Path, *, check: Check) -> JsonLines:
    offsets, offset = array("q"), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{str(path)!r}, line {number}"
                try:
                    record = msgspec.json.decode(line.removeprefix(_BYTE_ORDER_MARK))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
                    raise DataError(f"{where}, is not JSON ({exc}); write one JSON object per line") from exc
                if not isinstance(record, dict):
                    raise DataError(f"{where}, must be a JSON object, got {type(record).__name__}; write one JSON object per line")
                check(record, where)
                offsets.append(offset)
            offset += len(line)
    return JsonLines(path, offsets)


def _open_parquet(path: str, *, check: Check) -> Table:
    parquet = import_extra("pyarrow.parquet", "read Parquet files")
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as exc:
        raise DataError(f"data file {path!r} is not readable as Parquet: {first_line(exc)}") from exc
    return _checked(Table(table), path, check)


def _open_hub(path: str, *, split: str, check: Check) -> Table:
    datasets = import_extra("datasets", "read a hub dataset")
    name, _, config_name = path.partition(":")
    try:
        dataset = datasets.load_dataset(name, config_name or None, split=split)
    except (OSError, ValueError) as exc:
        raise DataError(
            f"dataset {path!r}, split {split!r}, could not be loaded: {first_line(exc)}; check the name (org/name, or org/name:config),"
            " the split and the connection, or give a .jsonl or .parquet file") from exc
    return _checked(Table(dataset.with_format("arrow")[:]), f"{path} ({split})", check)


def _checked(source: Table, name: str, check: Check) -> Table:
    for start in range(0, len(source), _TABLE_CHUNK):
        for index, record in enumerate(source.table.slice(start, _TABLE_CHUNK).to_pylist(), start=start):
            check(record, f"{name!r}, row {index}")
    return source


def import_extra(module: str, purpose: str, *, extra: str = "hub") -> Any:
    """Import an optional module when it is needed, since it may be missing, and is slow to import.

    Raises:
        MissingExtraError: it is not installed; the message says that `purpose` needs it, and that `offbeat[extra]` provides it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise MissingExtraError(f"to {purpose}, {module.partition('.')[0]} must be installed: pip install 'offbeat[{extra}]'") from exc
