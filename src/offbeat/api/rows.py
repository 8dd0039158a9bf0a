"""Writes rows in memory to a file of JSON lines, which a run reads like any other.

The file is named after its contents and lies in `.data` beside the runs, since a run's own folder may be moved when a run begins anew.
Called by `api.settings`.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date, time
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from offbeat.data.cells import in_memory, shortest
from offbeat.data.image_memory import as_uris
from offbeat.data.messages import without_filled_nulls
from offbeat.data.row import Row
from offbeat.errors import DataError, StorageError, shorten

Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any] | Row]
"""A file, a hub id or a built-in task; or rows in memory: a list, a generator, a data frame, or an object of `datasets`."""

Sets = Rows | Mapping[str, Rows]
"""Rows, or sets of rows by their names."""

FOLDER = ".data"

_DIGEST_BYTES = 8


@dataclass(frozen=True)
class RowsFile:
    """Rows that were written to a file; `fields` are the names of the first row's fields."""

    path: Path
    num_rows: int
    fields: tuple[str, ...]


def is_named(data: Rows) -> bool:
    """Whether the data is the text or path of a source such as "words.jsonl", rather than rows."""
    return isinstance(data, str | os.PathLike)


def sets_of(data: Sets | None, *, unnamed: str) -> dict[str, Rows]:
    """Return sets of rows by their names; rows without a name are the set `unnamed`, and None is no set."""
    if data is None:
        return {}
    return dict(cast(Mapping[str, Rows], data)) if isinstance(data, Mapping) else {unnamed: cast(Rows, data)}


def write_rows(rows: Iterable[Mapping[str, Any] | Row], folder: Path, *, argument: str) -> RowsFile:
    """Write rows in memory as JSON lines below `folder`; rows that were written before are found again.

    Args:
        argument: name of the argument that gave them, such as "data", for messages.

    Raises:
        DataError: there are none, or one is no mapping, or has a value that JSON cannot express; names its number.
        StorageError: the folder cannot be written.
    """
    digest, num_rows, fields = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0, ()
    records = _records(rows, argument)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{os.getpid()}.tmp"
        try:
            with unfinished.open("wb") as file:
                for num_rows, record in enumerate(records, start=1):
                    fields = fields or tuple(record)
                    line = _encode(record, argument, num_rows) + b"\n"
                    digest.update(line)
                    file.write(line)
            if not num_rows:
                raise DataError(f"{argument} has no rows; give at least one, such as {{'prompt': '2+2=', 'answer': '4'}}")
            path = folder / f"{digest.hexdigest()}.jsonl"
            unfinished.replace(path)  # not by `disk.replacing`, which needs the name before the bytes
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as exc:
        raise StorageError(f"cannot write the rows of {argument} to {folder}: {exc.strerror}; free space or set run.dir") from exc
    return RowsFile(path, num_rows, fields)


def _records(rows: Any, argument: str) -> Iterator[Mapping[str, Any]]:
    """Yield each row as a mapping."""
    if isinstance(rows, Mapping):
        raise DataError(
            f"{argument} must be rows, got a mapping of {', '.join(map(repr, list(rows)[:4]))}; give one of them, such as dataset['train']")
    narrow = _narrow_columns(rows)
    if hasattr(rows, "iter_rows"):  # a data frame of polars
        rows = map(without_filled_nulls, rows.iter_rows(named=True))
    elif hasattr(rows, "columns") and hasattr(rows, "to_dict"):  # of pandas
        rows = map(_of_pandas, rows.to_dict("records"))
    elif hasattr(rows, "features"):  # an object of datasets
        rows = map(without_filled_nulls, rows)
    if not isinstance(rows, Iterable):
        raise DataError(f"{argument} must be a file, a hub id, or rows as a list of dicts, got {shorten(rows)}")
    for number, row in enumerate(rows, start=1):
        if isinstance(row, Row):
            yield _record_of(row, f"{argument}, row {number},")
        elif isinstance(row, Mapping):
            yield {**row, **{name: shortest(row[name], kind) for name, kind in narrow.items() if isinstance(row.get(name), float)}}
        else:
            raise DataError(f"{argument}, row {number}, must be a dict or an offbeat.Row, got {shorten(row)}")


def _of_pandas(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a data frame; in its cells that are arrays, the table has filled in null for keys of other rows."""
    cells = {name: _lists(value) for name, value in record.items() if getattr(value, "ndim", 0)}
    return {**record, **without_filled_nulls(cells)}


def _lists(value: Any) -> Any:
    """Return arrays of numpy as lists, at any depth."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return in_memory(value, "")
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {key: _lists(each) for key, each in value.items()}
    return [_lists(each) for each in value] if isinstance(value, list) else value


def _narrow_columns(rows: Any) -> dict[str, Any]:
    """Return the types of columns, by name, whose numbers get more digits in Python's type, such as float32."""
    # A data frame of pandas has its columns as attributes, too, so its own attribute comes first.
    given = (getattr(rows, attribute, None) for attribute in ("dtypes", "schema", "features"))
    named: Any = next((types for types in given if hasattr(types, "items")), {})
    kinds = {name: str(getattr(kind, "dtype", kind)).lower() for name, kind in named.items()}
    return {name: getattr(np, kind) for name, kind in kinds.items() if kind in ("float32", "float16")}


def _record_of(row: Row, where: str) -> dict[str, Any]:
    if row.template_kwargs:
        raise DataError(f"{where} has template_kwargs, which rows in memory have no place for; set data.chat_template_kwargs")
    beside = {"images": row.images} if row.images else {}
    extra = beside | {name: json.loads(text) if name in row.json_fields else text for name, text in row.extra.items()}
    answer = extra["answer"] if row.extra.get("answer") == row.answer else row.answer  # as it was in the data, unless changed since
    row = replace(row, prompt=row.shown_prompt)
    if isinstance(row.prompt, str):
        if row.solution or row.said or row.tools:
            raise DataError(
                f"{where} has a solution, a message or tools, which a prompt that is text has no place for; give the solution as the"
                " answer, or a prompt that is a list of messages")
        return {**extra, "prompt": row.prompt, "answer": answer}
    said = [row.imitated] if row.said or row.solution else []
    return {**extra, **({"tools": row.tools} if row.tools else {}), "messages": [*row.prompt, *said], "answer": answer}


def _encode(record: Mapping[str, Any], argument: str, number: int) -> bytes:
    plain = {name: in_memory(as_uris(value), f"{argument}, row {number}: field {name!r}") for name, value in record.items()}
    try:
        return msgspec.json.encode(plain, enc_hook=_plain)
    except (NotImplementedError, TypeError, ValueError, msgspec.EncodeError, RecursionError) as exc:
        raise DataError(f"{argument}, row {number}, cannot be written as JSON: {exc}; give text, numbers, lists and dicts") from exc


def _plain(value: Any) -> Any:
    """Convert a value of numpy, pandas, datetime or pathlib for JSON."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, date | time):  # a Timestamp of pandas is a datetime, and that is a date
        return value.isoformat()
    if hasattr(value, "tolist"):  # arrays and scalars of numpy
        return value.tolist()
    raise NotImplementedError(f"{shorten(value)} is not JSON")
