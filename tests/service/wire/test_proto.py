"""The codec agrees with the reference implementation of protocol buffers, and its work has a bound."""

import struct
import time
import tracemalloc
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.service.errors import BadRequestError, TooLargeError
from offbeat.service.wire.proto import decode_proto, encode
from offbeat.service.wire.schema import SCHEMA, ProtoField
from wire_golden import REQUESTS, golden_bytes

KINDS = ("ForwardBackwardRequest", "ForwardBackwardOutput", "SampleResponse")
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(max_size=8), "bytes": st.binary(max_size=8), "double": st.floats(allow_nan=False), "bool": st.booleans(),
    "int32": st.integers(-(2**31), 2**31 - 1), "int64": st.integers(-(2**63), 2**63 - 1), "uint32": st.integers(0, 2**32 - 1)}
ONLY_ONE = {"LossConfigValue", "Chunk", "Tensor"}  # have fields of which at most one is set
MANY = 10_000


def _pool() -> descriptor_pool.DescriptorPool:
    """The reference implementation's view of the table."""
    file = descriptor_pb2.FileDescriptorProto(name="wire.proto", package="wire", syntax="proto3")
    types = descriptor_pb2.FieldDescriptorProto
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name.replace(" ", "_"))
        for field in fields.values():
            kind = "message" if field.kind in SCHEMA else field.kind
            added = message.field.add(
                name=field.name, number=field.number, type=getattr(types, f"TYPE_{kind.upper()}"),
                label=types.LABEL_OPTIONAL if field.form == "one" else types.LABEL_REPEATED)
            if kind == "message":
                added.type_name = f".wire.{field.kind.replace(' ', '_')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


POOL = _pool()


def _reference(kind: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"wire.{kind.replace(' ', '_')}"))()


def _fill(reference: Any, kind: str, message: dict[str, Any]) -> Any:
    for field in SCHEMA[kind].values():
        if (value := message.get(field.name)) is None:
            continue
        if field.form == "map":
            for key, item in value.items():
                _fill(getattr(reference, field.name).add(), field.kind, {"key": key, "value": item})
        elif field.kind in SCHEMA:
            for item in value if field.form == "many" else [value]:
                child = getattr(reference, field.name)
                target = child.add() if field.form == "many" else child
                target.SetInParent()
                _fill(target, field.kind, item)
        elif field.form == "many":
            getattr(reference, field.name).extend(value)
        else:
            setattr(reference, field.name, value)
    return reference


def _plain(value: Any) -> Any:
    """Without views, and without what is as good as absent."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if isinstance(item, dict) or _plain(item) not in (0, "", b"", [], False)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return bytes(value) if isinstance(value, memoryview) else value


def _values(field: ProtoField) -> st.SearchStrategy[Any]:
    one = _messages(field.kind) if field.kind in SCHEMA else SCALARS[field.kind]
    if field.form == "map":
        value = SCHEMA[field.kind][2].kind
        return st.dictionaries(st.text(max_size=4), _messages(value) if value in SCHEMA else SCALARS[value], min_size=1, max_size=3)
    return st.lists(one, min_size=1, max_size=3) if field.form == "many" else one


def _messages(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    fields = {field.name: _values(field) for field in SCHEMA[kind].values()}
    if kind in ONLY_ONE:
        return st.sampled_from(sorted(fields)).flatmap(lambda name: st.fixed_dictionaries({name: fields[name]}))
    return st.fixed_dictionaries({}, optional=fields)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_go_to_the_reference_and_back(kind: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(message=_messages(kind))
    def check(message: dict[str, Any]) -> None:
        theirs = _fill(_reference(kind), kind, message).SerializeToString()
        ours = encode(kind, message)
        assert _plain(decode_proto(kind, theirs, max_fields=MANY)) == _plain(decode_proto(kind, ours, max_fields=MANY)) == _plain(message)
        read = _reference(kind)
        read.ParseFromString(ours)
        assert _plain(decode_proto(kind, read.SerializeToString(), max_fields=MANY)) == _plain(message)

    check()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_messages_are_refused_or_read_as_the_reference_reads_them(data: st.DataObject) -> None:
    body = bytearray(golden_bytes(REQUESTS[data.draw(st.sampled_from(sorted(REQUESTS)))]))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = bytes(body[: data.draw(st.integers(0, len(body)))])
    reference = _reference("ForwardBackwardRequest")
    try:
        reference.ParseFromString(body)
    except Exception:
        reference = None
    try:
        message = decode_proto("ForwardBackwardRequest", body, max_fields=MANY)
    except BadRequestError:
        return  # groups, which the reference reads and passes over, are refused here
    assert reference is not None
    assert _plain(decode_proto("ForwardBackwardRequest", reference.SerializeToString(), max_fields=MANY)) == _plain(message)


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        decode_proto("ForwardBackwardRequest", body, max_fields=MANY)
    except BadRequestError as exc:
        assert "ForwardBackwardRequest" in str(exc)


def test_numbers_of_a_list_may_come_packed_or_one_by_one() -> None:
    packed, single = b"\x22\x02\x03\x04", b"\x20\x03\x20\x04"
    assert decode_proto("Tensor", packed, max_fields=9) == decode_proto("Tensor", single, max_fields=9) == {"shape": [3, 4]}


def test_a_message_that_comes_in_parts_is_one() -> None:
    first = encode("Chunk", {"encoded_text": {}})
    second = encode("Chunk", {"encoded_text": {"tokens": b"1234"}})
    assert decode_proto("Chunk", second + first, max_fields=9) == {"encoded_text": {"tokens": b"1234"}}


def test_what_is_not_in_the_table_is_passed_over() -> None:
    unknown = b"\x58\x01" + b"\x61" + struct.pack("<d", 1.0) + b"\x6d\x00\x00\x00\x00" + b"\x72\x01x"
    known = encode("SparseCsr", {"values": b"1"})
    assert decode_proto("SparseCsr", unknown + known + unknown, max_fields=9) == {"values": b"1"}


@pytest.mark.parametrize(("body", "says"), [
    (b"\x0a\x05ab", "field 1 is cut off"), (b"\x10", "a number is cut off"), (b"\x10" + b"\xff" * 11, "too long"),
    (b"\x0b", "field 1 has the wire type 3"), (b"\x02\x00", "there is no field 0"), (b"\x0a\x01\xff", "utf-8")])
def test_a_body_that_is_none_is_refused_with_the_reason(body: bytes, says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        decode_proto("ForwardBackwardRequest", body, max_fields=MANY)


@pytest.mark.parametrize(("kind", "message"), [
    ("ForwardBackwardRequest", {"data": [{}] * (1 << 16)}),
    ("ForwardBackwardRequest", {"data": [{"model_input": [{}] * (1 << 16)}]}),
    ("ForwardBackwardRequest", {"loss_fn_config": {str(number): 0.0 for number in range(1 << 14)}}),
    ("Tensor", {"shape": [1] * (1 << 16)})], ids=["datums", "chunks", "settings", "shape"])
def test_a_body_of_many_small_fields_costs_little(kind: str, message: dict[str, Any]) -> None:
    body = encode(kind, message)
    tracemalloc.start()
    started = time.thread_time()
    with pytest.raises(TooLargeError, match="more than 10000 fields"):
        decode_proto(kind, body, max_fields=MANY)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20 and time.thread_time() - started < 5
    tracemalloc.stop()


def test_byte_fields_are_views_of_the_body() -> None:
    body = encode("EncodedTextChunk", {"tokens": b"x" * 1000})
    assert decode_proto("EncodedTextChunk", body, max_fields=9)["tokens"].obj is body
