"""Tensors are read as they are, and refused with their name where they contradict themselves."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from offbeat.service.errors import BadRequestError
from offbeat.service.wire.schema import FLOAT32, INT32, INT64
from offbeat.service.wire.tensors import Tensor, read_tensor

BIG = np.array([1 << 40], "<i8").tobytes()


def ints(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def read(message: dict[str, Any], max_cells: int = 100, max_width: int = 50) -> Tensor:
    return read_tensor(message, name="data[3].weights", max_cells=max_cells, max_width=max_width)


def sparse(values: bytes, crow: bytes, col: bytes, *shape: int) -> dict[str, Any]:
    return {"sparse_csr": {"values": values, "crow_indices": crow, "col_indices": col}, "dtype": INT64, "shape": list(shape)}


def test_a_dense_tensor_is_a_view_of_its_bytes() -> None:
    data = floats(1, 2, 3, 4, 5, 6)
    tensor = read({"dense": memoryview(data), "dtype": FLOAT32, "shape": [2, 3]})
    assert tensor.values.tolist() == tensor.at(None).tolist() == [1, 2, 3, 4, 5, 6]
    assert tensor.shape == (2, 3) and tensor.cells is None and not tensor.values.flags.owndata


def test_a_tensor_without_a_shape_is_a_vector() -> None:
    assert read({"dense": ints(7, 8), "dtype": INT64}).shape == (2,)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@settings(max_examples=60, deadline=None)
@given(dense=arrays.arrays(np.int64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.sampled_from([0, 0, 0, 5, 9])))
def test_compressed_rows_are_what_torch_makes_of_them(dense: np.ndarray) -> None:
    rows = torch.from_numpy(dense).to_sparse_csr()
    parts = [part.numpy().astype("<i8").tobytes() for part in (rows.values(), rows.crow_indices(), rows.col_indices())]
    tensor = read(sparse(*parts, *dense.shape))
    assert tensor.at(None).reshape(dense.shape).tolist() == dense.tolist()
    assert tensor.cells is not None and tensor.cells.tolist() == np.flatnonzero(dense).tolist()
    wanted = np.unique([0, *tensor.cells, dense.size - 1])
    assert tensor.at(wanted).tolist() == dense.reshape(-1)[wanted].tolist()


@pytest.mark.parametrize(("message", "says"), [
    ({"dense": b""}, "must be float32"),
    ({"dense": ints(1), "dtype": INT32}, "got dtype 3"),
    ({"dtype": INT64}, "got neither"),
    ({**sparse(b"", ints(0, 0), b"", 1, 2), "dense": b""}, "got both"),
    ({"dense": b"1234567", "dtype": INT64}, "int64 numbers of 8 bytes, got 7 bytes"),
    ({"dense": ints(1, 2, 3), "dtype": INT64, "shape": [2]}, "must have 2 values for shape .2., got 3"),
    ({"dense": b"", "dtype": INT64}, "not empty"),
    ({"dense": ints(1), "dtype": INT64, "shape": [-1]}, "got shape .-1."),
    ({"dense": ints(1), "dtype": INT64, "shape": [1, 1, 1]}, "got shape .1, 1, 1."),
    ({"dense": ints(1), "dtype": INT64, "shape": [1 << 62, 1 << 62]}, "at most 100 cells"),
    (sparse(ints(1), ints(0, 1), ints(0), 1, 51), "K up to 50, .* got shape .1, 51."),
    ({"dense": b"", "dtype": INT64, "shape": [1 << 62, 0]}, "not empty"),
    ({"dense": floats(1, float("nan")), "dtype": FLOAT32}, "must be finite, got nan at value 1"),
    ({"dense": floats(float("-inf")), "dtype": FLOAT32}, "must be finite, got -inf at value 0"),
    (sparse(ints(1), ints(0, 1), ints(0), 1), "its shape must be .N, K., got .1."),
    (sparse(ints(1), ints(0, 1), ints(0)), "its shape must be"),
    (sparse(ints(1), ints(0, 1), ints(2), 1, 2), "must be in 0..1, got 2 to 2"),
    (sparse(ints(1), ints(0, 1), ints(-1), 1, 2), "must be in 0..1"),
    (sparse(ints(1), BIG + BIG, ints(0), 1, 2), "must rise from 0 to 1 in 2 steps"),
    (sparse(ints(1), ints(0, 2, 1), ints(0), 2, 2), "must rise from 0"),
    (sparse(ints(1), ints(0), ints(0), 1, 2), "must rise from 0"),
    (sparse(ints(1), b"", b"", 1, 2), "must rise from 0"),
    (sparse(ints(1, 2), ints(0, 2), ints(1, 1), 1, 2), "must rise within each row"),
    (sparse(ints(1, 2), ints(0, 2), ints(1, 0), 1, 2), "must rise within each row"),
    (sparse(ints(1, 2, 3), ints(0, 2), ints(0, 1), 1, 2), "must have 2 values"),
])
def test_what_does_not_fit_is_refused_by_name(message: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError, match=rf"data\[3\].weights.*{says}"):
        read(message)


NUMBERS = st.lists(st.integers(-2, 9), max_size=6).map(lambda values: ints(*values))


@settings(max_examples=200, deadline=None)
@given(message=st.fixed_dictionaries({}, optional={
    "dense": st.one_of(st.binary(max_size=20), NUMBERS), "dtype": st.integers(-1, 4), "shape": st.lists(st.integers(-2, 4), max_size=3),
    "sparse_csr": st.fixed_dictionaries({}, optional={"values": NUMBERS, "crow_indices": NUMBERS, "col_indices": NUMBERS})}))
def test_any_message_is_read_whole_or_refused(message: dict[str, Any]) -> None:
    try:
        tensor = read(message)
    except BadRequestError:
        return
    assert len(tensor.at(None)) == np.prod(tensor.shape)
