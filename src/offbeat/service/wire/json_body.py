"""Parses JSON bodies strictly by type and range, with one sentence about a mistake. Used by `app`, with the classes of `bodies`.

Unknown fields are ignored, because newer clients send more. A class's own check raises ValueError with a whole sentence, from which
`read_json` makes the refusal.
"""

import json
import re
from typing import Annotated, ClassVar, TypeVar

import msgspec

from offbeat.service.errors import BadRequestError, TooLargeError

B = TypeVar("B")

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
Label = Annotated[str, msgspec.Meta(max_length=1000, pattern="^[^\\0]*$")]
"""Stored as text, which cannot contain NUL in PostgreSQL."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TrainingSeq = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
"""The largest number that the binary half of the protocol can carry."""
TtlSeconds = Annotated[int, msgspec.Meta(ge=3600, le=10 * 365 * 86400)]

MAX_JSON_BYTES = 1 << 20
"""Limit for bodies other than sampling; the longest hold 64 KiB of metadata and 100 tags, with up to 6 bytes per character."""
MAX_SAMPLE_BYTES = 4 << 20
"""Limit for sampling bodies: 600,000 numbers of 6 digits, enough for prompts of 64 Ki tokens with 8 target tokens at each position."""
_MAX_METADATA_BYTES = 65536
_EXPLAINED_BYTES = 65536
"""Size up to which an invalid body is parsed again to quote the wrong value."""
_SHOWN = 80
_KINDS = {
    "int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list", "object": "an object"}

Metadata = dict[str, msgspec.Raw]
"""Metadata that users attach to objects; `metadata_of` converts it."""


class Body(msgspec.Struct, kw_only=True):
    """A JSON object; the body of each class has at most `max_bytes`."""

    max_bytes: ClassVar[int] = MAX_JSON_BYTES


class TrainingBody(Body):
    """Common fields of requests to a model: its ID, and the request's place in its order."""

    model_id: Text
    seq_id: TrainingSeq


def read_json(kind: type[B], data: bytes) -> B:
    """Parse a body as a subclass of `Body`.

    Raises:
        TooLargeError: it has more bytes than this class allows.
        BadRequestError: it is not JSON, or a field is missing, of the wrong type or out of range; the sentence names it. For a request to
            a model, the error carries the model and the number of the request if they could be read.
    """
    if len(data) > (most := getattr(kind, "max_bytes", MAX_JSON_BYTES)):
        raise TooLargeError(f"the body has {len(data)} bytes, but this kind of JSON may have at most {most}; send less at once")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        error = BadRequestError(_sentence(exc, data))
        error.model_id, error.seq_id = _training_ids(data)
        raise error from exc


def _training_ids(data: bytes) -> tuple[str, int]:
    """Return the model and the number of a request to a model whose body is wrong elsewhere, such as ("SESSION:train:0", 5)."""
    if len(data) > _EXPLAINED_BYTES:
        return "", 0
    try:
        ids = msgspec.json.decode(data, type=TrainingBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", 0
    return ids.model_id, ids.seq_id


def _sentence(exc: Exception, data: bytes) -> str:
    """Return a sentence about the mistake in a body, made from msgspec's message."""
    if isinstance(exc, RecursionError):
        return "the body has too many lists within lists"
    if not isinstance(exc, msgspec.ValidationError):
        return f"the body is not JSON: {exc}" if data else "the body is empty; send a JSON object"
    said, _, place = str(exc).partition(" - at `$")
    place = place.strip("`.")
    if exc.__cause__ is not None:  # one of our own checks, whose message is already a sentence
        return said
    if missing := re.fullmatch(r"Object missing required field `(.*)`", said):
        return f"{place}{place and '.'}{missing[1]} is missing"
    if wanted := re.match(r"Expected `([^`]*)`([^,]*)", said):
        kinds = " or ".join(_KINDS.get(kind, kind) for kind in wanted[1].split(" | "))
        return f"{place or 'the body'} must be {kinds}{wanted[2]}, got {_value_at(place, data)}"
    return f"{place or 'the body'} is wrong: {said}"


def _value_at(place: str, data: bytes) -> str:
    """Return the beginning of the JSON at a place such as `a.b[0]`."""
    if len(data) > _EXPLAINED_BYTES:
        return "something else"
    try:
        value = msgspec.json.decode(data)
        for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", place):
            value = value[int(index)] if index else value[key]
        text = json.dumps(value)
    except (msgspec.DecodeError, ValueError, LookupError, TypeError, RecursionError):  # the rest is not JSON
        return "something else"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def metadata_of(given: Metadata | None) -> dict[str, str]:
    """Return a user's metadata as texts, e.g. {"lr": 0.1} as {"lr": "0.1"}; raises ValueError if it is too large, or not Unicode."""
    raw = {key: bytes(value) for key, value in (given or {}).items()}
    if sum(len(key) + len(value) for key, value in raw.items()) > _MAX_METADATA_BYTES:
        raise ValueError(f"user_metadata may have {_MAX_METADATA_BYTES} bytes in all; keep larger things elsewhere")
    try:
        return {key: msgspec.json.decode(text, type=str) if text[:1] == b'"' else text.decode() for key, text in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ValueError(f"user_metadata holds what is not Unicode: {exc}") from exc
