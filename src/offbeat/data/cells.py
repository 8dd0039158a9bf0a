"""Values in records of data as their author wrote them. Used by the readers of files and by rows in memory.

A number of JSON keeps its text, so that the answer 1e3 is not 1000.0 and 0.10 not 0.1. A float32 of a table is the shortest decimal that
stands for it, such as 0.1 instead of 0.10000000149011612. Bytes are text, if they are UTF-8.
"""

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

from offbeat.errors import DataError

_NARROW = {"halffloat": np.float16, "float": np.float32}
"""Types of pyarrow whose numbers become longer in Python's."""


class NumberText(float):
    """A number that has a fraction or an exponent, and is written as in the data."""

    text: str

    def __new__(cls, text: str) -> "NumberText":
        self = super().__new__(cls, text)
        self.text = text
        return self

    def __str__(self) -> str:
        return self.text


_RECORD = msgspec.json.Decoder(Any, float_hook=NumberText)


def decode_record(text: bytes) -> Any:
    """Decode JSON; numbers keep their text where they are values of a record, and are floats deeper inside of it.

    Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError if it is no JSON.
    """
    return _with_numbers(_RECORD.decode(text))


def decode_records(text: bytes) -> list[Any]:
    """Decode a JSON array of records, each as `decode_record` does. Raises as `decode_record`, also if it is no array."""
    return [_with_numbers(each) for each in msgspec.convert(_RECORD.decode(text), list)]


def _with_numbers(record: Any) -> Any:
    return {name: _plain(value) if isinstance(value, dict | list) else value for name, value in record.items()} if isinstance(
        record, dict) else record


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return float(value) if isinstance(value, NumberText) else value


def is_absent(value: Any) -> bool:
    """Whether a value stands for none: null, or the NaN that tables have in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def json_text(value: Any) -> str:
    """Return a value as JSON text; a type that JSON does not know is written as text."""
    return value.text if isinstance(value, NumberText) else json.dumps(value, default=str)


def shortest(value: float, kind: Any) -> float:
    """Return the shortest decimal that stands for a number of a narrow type, such as np.float32."""
    return float(str(kind(value)))


def of_table(record: dict[str, Any], schema: Any) -> dict[str, Any]:
    """Return a record of a `pyarrow.Table` with numbers at their shortest, and columns of bytes as text where they are any."""
    for column in schema:
        value = record[column.name]
        if value is not None and (kind := str(column.type)) != "string":
            record[column.name] = _as_text(value) if "binary" in kind and isinstance(value, bytes) else _of_type(value, column.type, kind)
    return record


def _of_type(value: Any, type_: Any, kind: str) -> Any:
    if value is None or ("float" not in kind):
        return value
    if kind in _NARROW:
        return shortest(value, _NARROW[kind])
    if isinstance(value, list) and hasattr(type_, "value_type"):
        return [_of_type(each, type_.value_type, str(type_.value_type)) for each in value]
    if isinstance(value, dict):
        return {each.name: _of_type(value[each.name], each.type, str(each.type)) for each in type_}
    return value


def _as_text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def in_memory(value: Any, where: str) -> Any:
    """Return a value of a Python program as JSON knows it: bytes as text, numbers of narrow types at their shortest.

    Raises DataError for bytes that are no text; `where` names the field, as in "data, row 1: field 'prompt'".
    """
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            raise DataError(
                f"{where} holds {len(bytes(value))} bytes that are no text in UTF-8; give text, or leave the field out") from None
    if isinstance(value, Mapping):
        return {name: in_memory(each, where) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [in_memory(each, where) for each in value]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind == "f" and value.dtype.itemsize < 8:
        return value.astype(str).astype(np.float64).tolist()
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value


def number_or_text(value: Any) -> str | None:
    """Return an answer that is text or a number as text; None for all else."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return format(value, "f") if isinstance(value, Decimal) else None
