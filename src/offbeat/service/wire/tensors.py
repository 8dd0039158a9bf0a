"""Parses tensors of training requests, dense or sparse, into numpy arrays. Used by `training`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.service.errors import BadRequestError
from offbeat.service.wire.schema import FLOAT32, INT64

_DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
_INDEX = np.dtype("<i8")


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor with all its values, or only its non-zero ones.

    Attributes:
        values: [N] float32 or int64, finite.
        shape: [L] or [L, K], each at least 1.
        cells: [N] int64, increasing: flat indices of the values; None if every cell has a value.
    """

    values: np.ndarray
    shape: tuple[int, ...]
    cells: np.ndarray | None = None

    def at(self, cells: np.ndarray | None) -> np.ndarray:
        """Return the values of `cells` ([M] int64, increasing), which must include all stored cells, or of every cell for None.

        The result is [M], in the dtype of `values`; cells that are not stored are 0.
        """
        if self.cells is None:
            return self.values if cells is None else self.values[cells]
        values = np.zeros(math.prod(self.shape) if cells is None else len(cells), self.values.dtype)
        values[self.cells if cells is None else np.searchsorted(cells, self.cells)] = self.values
        return values


def read_tensor(message: Mapping[str, Any], *, name: str, max_cells: int, max_width: int) -> Tensor:
    """Parse a tensor message, whose `name` errors tell, as a view of its bytes; `max_width` is the largest K of a tensor [N, K].

    Raises:
        BadRequestError: it is neither float32 nor int64, its parts do not fit each other, it is too large, or a value is not finite.
    """
    dtype = _DTYPES.get(message.get("dtype", 0))
    if dtype is None:
        raise BadRequestError(f"{name} must be float32 (dtype 1) or int64 (dtype 2), got dtype {message.get('dtype', 0)}")
    if ("dense" in message) == ("sparse_csr" in message):
        raise BadRequestError(f"{name} must be either dense or sparse, got {'both' if 'dense' in message else 'neither'}")
    sparse = message.get("sparse_csr")
    values = _array(message["dense"] if sparse is None else sparse.get("values", b""), dtype, name)
    shape = tuple(message.get("shape", ())) or (len(values),)
    if len(shape) > 2 or min(shape) < 1 or math.prod(shape) > max_cells or (len(shape) == 2 and shape[1] > max_width):
        raise BadRequestError(
            f"{name} must be [N] or [N, K] with K up to {max_width}, not empty, with at most {max_cells} cells, got shape"
            f" {list(shape[:4])}; send fewer targets for each position, or shorter datums")
    if dtype.kind == "f" and not np.isfinite(values).all():
        place = int(np.flatnonzero(~np.isfinite(values))[0])
        raise BadRequestError(f"{name} must be finite, got {values[place]} at value {place}")
    cells = None if sparse is None else _cells(sparse, shape, name)
    num_cells = math.prod(shape) if cells is None else len(cells)
    if len(values) != num_cells:
        raise BadRequestError(f"{name} must have {num_cells} values for shape {list(shape)}, got {len(values)}")
    return Tensor(values, shape, cells)


def _cells(sparse: Mapping[str, Any], shape: tuple[int, ...], name: str) -> np.ndarray:
    """Return the flat indices [N] int64 of the cells in compressed sparse rows.

    For example, crow_indices [0, 1, 2] and col_indices [1, 2] of a (2, 3) tensor are the cells [1, 5].
    """
    if len(shape) != 2:
        raise BadRequestError(f"{name} is sparse, so its shape must be [N, K], got {list(shape)}")
    rows, width = shape
    bounds = _array(sparse.get("crow_indices", b""), _INDEX, f"crow_indices of {name}")
    columns = _array(sparse.get("col_indices", b""), _INDEX, f"col_indices of {name}")
    if len(bounds) != rows + 1 or bounds[0] != 0 or bounds[-1] != len(columns) or np.any(bounds[1:] < bounds[:-1]):
        raise BadRequestError(f"crow_indices of {name} must rise from 0 to {len(columns)} in {rows + 1} steps")
    if len(columns) and not 0 <= columns.min() <= columns.max() < width:
        raise BadRequestError(f"col_indices of {name} must be in 0..{width - 1}, got {columns.min()} to {columns.max()}")
    cells = np.repeat(np.arange(rows), np.diff(bounds)) * width + columns
    if np.any(cells[1:] <= cells[:-1]):
        raise BadRequestError(f"col_indices of {name} must rise within each row")
    return cells


def _array(data: Any, dtype: np.dtype, name: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise BadRequestError(f"{name} must hold {dtype.name} numbers of {dtype.itemsize} bytes, got {len(data)} bytes")
    return np.frombuffer(data, dtype)
