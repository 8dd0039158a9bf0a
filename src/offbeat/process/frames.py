"""Messages of parent and child over their socket pair: frames, and exceptions in transit."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat import errors

HEADER = struct.Struct("!QQB")
"""Payload bytes, call id, kind, for example (5, 12, RESULT) before an answer of 5 bytes to call 12."""

Payload = bytes | Sequence[bytes | memoryview]
"""Argument of a call: bytes, or pieces that make them up."""

READY, CALL, RESULT, FAILURE, STACK, STOP, BEAT, CANCEL = range(8)


@dataclass(frozen=True)
class CallFailure:
    """An exception in transit to the caller: the name of its class, its text, and its notes."""

    kind: str
    text: str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, exc: BaseException, *notes: str) -> "CallFailure":
        """Take the name, text and notes of an exception, with further notes."""
        return cls(type(exc).__name__, str(exc), (*getattr(exc, "__notes__", ()), *notes))

    def to_exception(self, name: str, doing: str) -> errors.OffbeatError:
        """Rebuild the exception: an `OffbeatError` as itself, others as a `WorkerError` that begins e.g. "rank 0 failed in train_step"."""
        cls = getattr(errors, self.kind, None)
        if isinstance(cls, type) and issubclass(cls, errors.OffbeatError):
            exc = cls(self.text)
        else:
            exc = errors.WorkerError(f"{name} failed {doing}: {self.kind}: {self.text}")
        for note in self.notes:
            exc.add_note(note)
        return exc

    def pack(self) -> bytes:
        """Encode as length-prefixed UTF-8 strings."""
        parts = [part.encode(errors="backslashreplace") for part in (self.kind, self.text, *self.notes)]
        return b"".join(struct.pack("!Q", len(part)) + part for part in parts)

    @classmethod
    def unpack(cls, data: bytes) -> "CallFailure":
        """Decode the bytes of `pack`."""
        parts, at = [], 0
        while at < len(data):
            (size,) = struct.unpack_from("!Q", data, at)
            parts.append(data[at + 8 : at + 8 + size].decode())
            at += 8 + size
        return cls(parts[0], parts[1], tuple(parts[2:]))
