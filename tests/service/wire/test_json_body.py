"""JSON bodies are read strictly, and what is wrong with one is said in one sentence."""

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.service.errors import BadRequestError, RequestError, TooLargeError
from offbeat.service.wire.json_body import (
    MAX_JSON_BYTES,
    MAX_SAMPLE_BYTES,
    Body,
    Count,
    Metadata,
    Text,
    TrainingBody,
    metadata_of,
    read_json,
)
from offbeat.service.wire.sample_body import SampleBody


class Part(Body):
    rate: float = 1.0
    names: list[Text] = []  # noqa: RUF012 (msgspec copies it)


class Whole(TrainingBody):
    count: Count = 0
    wide: bool = False
    part: Part | None = None
    user_metadata: Metadata | None = None

    def __post_init__(self) -> None:
        metadata_of(self.user_metadata)
        if self.count == 13:
            raise ValueError("count must not be 13; take 12")


def test_fields_that_are_not_named_are_passed_over() -> None:
    body = read_json(Whole, b'{"model_id": "m", "seq_id": 1, "type": "whole", "new": [1, {}]}')
    assert (body.model_id, body.seq_id, body.count) == ("m", 1, 0)


@pytest.mark.parametrize(("fields", "says"), [
    ('"count": "1"', 'count must be a whole number, got "1"'),
    ('"count": 1.5', "count must be a whole number, got 1.5"),
    ('"count": true', "count must be a whole number, got true"),
    ('"count": -1', "count must be a whole number >= 0, got -1"),
    ('"count": 9223372036854775808', "count must be a whole number <= 9223372036854775807, got 9223372036854775808"),
    ('"wide": 1', "wide must be true or false, got 1"),
    ('"part": [1]', "part must be an object or null, got [1]"),
    ('"part": {"rate": "x"}', 'part.rate must be a number, got "x"'),
    ('"part": {"names": ["a", ""]}', 'part.names[1] must be a string of length >= 1, got ""'),
    ('"part": {"names": "' + "a" * 100 + '"}', 'part.names must be a list, got "' + "a" * 79 + "..."),
    ('"part": {"rate": 1e999}', "part.rate is wrong: Number out of range"),
    ('"count": 13', "count must not be 13; take 12"),
])
def test_a_wrong_field_is_named_with_what_is_allowed_and_what_came(fields: str, says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_json(Whole, b'{"model_id": "m", "seq_id": 7, %s}' % fields.encode())
    assert str(caught.value) == says
    assert (caught.value.model_id, caught.value.seq_id) == ("m", 7)


@pytest.mark.parametrize(("data", "says"), [
    (b"", "the body is empty; send a JSON object"),
    (b"[]", "the body must be an object, got []"),
    (b'{"model_id": "m"}', "seq_id is missing"),
    (b'{"model_id": "m", "seq_id": 0}', "seq_id must be a whole number >= 1, got 0"),
    (b'{"model_id": 5, "seq_id": 1} and more', "model_id must be a string, got something else"),
    (b'{"model_id": NaN}', "the body is not JSON: JSON is malformed: invalid character (byte 13)"),
    (b'{"model_id": "m", "seq_id": 1, "x": ' + b"[" * 100_000, "the body has too many lists within lists"),
])
def test_a_body_that_cannot_be_read_says_why(data: bytes, says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_json(Whole, data)
    assert str(caught.value) == says and not caught.value.model_id


def test_a_body_of_many_bytes_is_refused_unread() -> None:
    with pytest.raises(TooLargeError, match="this kind of JSON may have at most 1048576"):
        read_json(Whole, b" " * (MAX_JSON_BYTES + 1))
    with pytest.raises(TooLargeError, match="this kind of JSON may have at most 4194304"):
        read_json(SampleBody, b" " * (MAX_SAMPLE_BYTES + 1))


def test_a_large_body_that_is_wrong_is_not_read_again_to_say_what_it_holds() -> None:
    with pytest.raises(BadRequestError) as caught:
        read_json(Whole, b'{"model_id": "m", "seq_id": 7, "count": "x", "more": "%s"}' % (b"y" * 70_000))
    assert str(caught.value) == "count must be a whole number, got something else" and not caught.value.model_id
    lists = b'{"model_id": "m", "seq_id": 7, "count": "x", "more": [' + b"[[]]," * 200_000 + b"1]}"
    begin = time.process_time()
    with pytest.raises(BadRequestError):
        read_json(Whole, lists)
    assert time.process_time() - begin < 0.05


def test_metadata_is_given_back_as_texts() -> None:
    body = read_json(Whole, b'{"model_id": "m", "seq_id": 1, "user_metadata": {"a": "x\\u00e9\\n", "b": [1, {"c": null}], "d": 1.50}}')
    assert metadata_of(body.user_metadata) == {"a": "x\u00e9\n", "b": '[1, {"c": null}]', "d": "1.50"}
    assert metadata_of(None) == {}


def test_metadata_has_a_bound() -> None:
    with pytest.raises(BadRequestError, match="user_metadata may have 65536 bytes"):
        read_json(Whole, b'{"model_id": "m", "seq_id": 1, "user_metadata": {"a": "%s"}}' % (b"x" * 65536))


def test_metadata_that_is_not_unicode_is_refused() -> None:
    for text in (b'"\\ud800"', b'"\xff"', b'["\xff"]'):
        with pytest.raises(BadRequestError):
            read_json(Whole, b'{"model_id": "m", "seq_id": 1, "user_metadata": {"a": %s}}' % text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rate", "names", ""]), inner, max_size=3), max_leaves=6)


@settings(max_examples=120, deadline=None)
@given(data=st.dictionaries(st.sampled_from(["model_id", "seq_id", "count", "wide", "part", "user_metadata"]), JSON).map(repr)
       | st.text(max_size=30), cut=st.integers(0, 100))
def test_anything_is_read_or_refused(data: str, cut: int) -> None:
    text = data.replace("'", '"').replace("None", "null").replace("True", "true").replace("False", "false")
    with contextlib.suppress(RequestError):
        read_json(Whole, text.encode("utf-8", "replace")[: 1000 - cut])
