"""Converts protocol-buffer messages to dictionaries and back, by the table in `schema`. Used by `training` and `answers`.

It is a codec of our own because the cost of a body must be bounded: at most `max_fields` objects are created, and arrays are views of the
body rather than copies. It also leaves the version of `protobuf` to other packages. Absent fields are absent from the dictionary, and
unknown ones are ignored.
"""

import struct
from collections.abc import Mapping
from typing import Any

from offbeat.errors import DataError
from offbeat.service.errors import BadRequestError, TooLargeError
from offbeat.service.wire.schema import SCHEMA, ProtoField

Message = dict[str, Any]

_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
_WIRE_TYPES = {"double": _FIXED64, "int32": _VARINT, "int64": _VARINT, "uint32": _VARINT, "bool": _VARINT}


def decode_proto(kind: str, data: bytes, *, max_fields: int, into: Message | None = None) -> Message:
    """Decode a message.

    Args:
        kind: name of the message in `SCHEMA`.
        max_fields: number of fields that the message and its submessages may have together; each number in a list counts as one.
        into: dictionary to fill; after an error it holds the fields before the mistake.

    Returns:
        The fields by name: str, memoryview, int, float and bool, lists, dictionaries and further messages.

    Raises:
        BadRequestError: the bytes are not such a message.
        TooLargeError: the message has too many fields.
    """
    try:
        return _Reader(data, max_fields).message(kind, 0, len(data), {} if into is None else into)
    except (DataError, UnicodeDecodeError) as exc:
        raise BadRequestError(f"the body is not a {kind} in protocol-buffer form: {exc}") from exc


class _Reader:
    """One pass over `data`; every field decrements `left`."""

    def __init__(self, data: bytes, max_fields: int) -> None:
        self._data = data
        self._view = memoryview(data)
        self._max_fields = max_fields
        self._left = max_fields

    def message(self, kind: str, at: int, end: int, into: Message) -> Message:
        """Add the fields between two positions to a message, which may already have some if it comes in parts."""
        fields = SCHEMA[kind]
        while at < end:
            self._use()
            key, at = self._varint(at, end)
            number, wire_type = key >> 3, key & 7
            if not 0 < number < 1 << 29:
                raise DataError(f"there is no field {number}")
            field = fields.get(number)
            if wire_type == _VARINT:
                value, at = self._varint(at, end)
                if field and _WIRE_TYPES.get(field.kind) == _VARINT:
                    _put(into, field, _whole(field.kind, value))
                continue
            if wire_type == _SIZED:
                size, at = self._varint(at, end)
            elif wire_type in (_FIXED64, _FIXED32):
                size = 8 if wire_type == _FIXED64 else 4
            else:
                raise DataError(f"field {number} has the wire type {wire_type}")
            if size > end - at:
                raise DataError(f"field {number} is cut off")
            if field and wire_type == _SIZED:
                self._sized(into, field, at, at + size)
            elif field and wire_type == _WIRE_TYPES.get(field.kind):
                _put(into, field, struct.unpack_from("<d", self._data, at)[0])
            at += size
        return into

    def _sized(self, into: Message, field: ProtoField, at: int, end: int) -> None:
        if field.form == "map":
            entry = self.message(field.kind, at, end, {})
            value = {} if SCHEMA[field.kind][2].kind in SCHEMA else 0.0
            into.setdefault(field.name, {})[entry.get("key", "")] = entry.get("value", value)
        elif field.kind in SCHEMA:
            _put(into, field, self.message(field.kind, at, end, into.get(field.name, {}) if field.form == "one" else {}))
        elif field.kind == "string":
            _put(into, field, self._data[at:end].decode())
        elif field.kind == "bytes":
            _put(into, field, self._view[at:end])
        elif field.form == "many":
            while at < end:
                self._use()
                value, at = self._varint(at, end)
                _put(into, field, _whole(field.kind, value))

    def _use(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TooLargeError(f"the body has more than {self._max_fields} fields; send the data in several requests")

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        data, value = self._data, 0
        for shift in range(0, 70, 7):
            if at >= end:
                break
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
        raise DataError("a number is cut off or too long")


def _put(into: Message, field: ProtoField, value: Any) -> None:
    if field.form == "many":
        into.setdefault(field.name, []).append(value)
    else:
        into[field.name] = value


def _whole(kind: str, value: int) -> int | bool:
    bits = 32 if kind in ("int32", "uint32") else 64
    value &= (1 << bits) - 1
    if kind == "bool":
        return value != 0
    return value - (1 << bits) if kind != "uint32" and value >> bits - 1 else value


def encode(kind: str, message: Mapping[str, Any]) -> bytes:
    """Encode the fields that a message has; values of type bytes may be any contiguous buffer."""
    parts: list[Any] = []
    for field in SCHEMA[kind].values():
        value = message.get(field.name)
        if value is None:
            continue
        if field.form == "one":
            parts += _field(field, value)
        elif field.form == "map":
            parts += [part for key, item in value.items() for part in _field(field, {"key": key, "value": item})]
        elif field.kind in _WIRE_TYPES:
            parts += _buffer(field.number, b"".join(map(_varint, value)))
        else:
            parts += [part for item in value for part in _field(field, item)]
    return b"".join(parts)


def _field(field: ProtoField, value: Any) -> tuple[Any, ...]:
    if field.kind in SCHEMA:
        return _buffer(field.number, encode(field.kind, value))
    if field.kind in ("string", "bytes"):
        return _buffer(field.number, value.encode() if field.kind == "string" else value)
    wire_type = _WIRE_TYPES[field.kind]
    return _varint(field.number << 3 | wire_type), struct.pack("<d", value) if wire_type == _FIXED64 else _varint(value)


def _buffer(number: int, data: Any) -> tuple[Any, ...]:
    return _varint(number << 3 | _SIZED), _varint(memoryview(data).nbytes), data


def _varint(value: int) -> bytes:
    value = int(value) & (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
