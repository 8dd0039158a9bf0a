"""What crosses a process: arrays of every allowed type, and nothing that is not a plain value."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from offbeat.data import wire
from offbeat.errors import DataError

DTYPES = ["bool", "uint8", "uint16", "int16", "int32", "int64", "float32", "float64"]


@dataclass(frozen=True, eq=False)
class Parcel:
    name: str
    values: np.ndarray
    counts: dict[str, float]


@given(array=st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=3, min_side=0))))
def test_an_array_comes_back_with_its_type_shape_and_bytes(array: np.ndarray) -> None:
    back = wire.decode(Parcel, wire.encode(Parcel("a", array, {}))).values
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_a_strided_array_and_numpy_numbers_cross() -> None:
    array = np.arange(12).reshape(3, 4).T
    back = wire.decode(Parcel, wire.encode(Parcel("a", array, {"x": np.float32(0.5), "n": np.int64(3)})))
    np.testing.assert_array_equal(back.values, array)
    assert back.counts == {"x": 0.5, "n": 3.0}


def test_pieces_are_the_bytes_of_the_whole_and_share_the_memory_of_large_arrays() -> None:
    large, strided = np.arange(40_000, dtype=np.int32), np.arange(60_000, dtype=np.float64).reshape(2, -1).T
    for value in (Parcel("a", large, {"x": 0.5}), [Parcel("a", large, {}), Parcel("b", np.arange(3), {}), strided], {"one": large[:0]}):
        assert b"".join(wire.encode_pieces(value)) == wire.encode(value)
    head, array, tail = wire.encode_pieces(Parcel("a", large, {}))
    assert np.shares_memory(np.frombuffer(array, np.int32), large) and max(len(head), len(tail)) < 100


def test_json_is_one_line() -> None:
    line = wire.encode_json(Parcel("a\nb", np.array([[1, 2]]), {"x": np.float32(0.5)}))
    assert line == b'{"name":"a\\nb","values":[[1,2]],"counts":{"x":0.5}}'


@pytest.mark.parametrize("data", [b"", b"\xc1", wire.encode({"name": 3}), wire.encode(["a"])])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="these bytes are not a Parcel"):
        wire.decode(Parcel, data)
    with pytest.raises(DataError, match="this JSON is not a Parcel"):
        wire.decode_json(Parcel, b'{"name": 3}')


@pytest.mark.parametrize("array", [("object", (1,), b"x" * 8), ("float64", (3,), b"x" * 8)])
def test_arrays_of_other_types_or_sizes_are_refused(array: tuple) -> None:
    with pytest.raises(DataError):
        wire.decode(Parcel, wire.encode({"name": "a", "values": array, "counts": {}}))


def test_objects_do_not_cross() -> None:
    with pytest.raises(NotImplementedError, match="Ellipsis|ellipsis"):
        wire.encode(...)
