"""Statistics that combine exactly over micro-batches, minibatches, ranks and workers.

The trainer collects with a `StatsTracker`. A `StatsPart` holds the collected sums and crosses processes. The parts of all ranks are joined
by `reduce` over a group, or by `combine` in a controller that holds them all; both give the same result. The module is torch-free, yet
accepts torch tensors: they stay on their device, and nothing is read back before the end.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import numpy as np

Reduce = Literal["mean", "sum", "min", "max"]


class ReduceGroup(Protocol):
    """Ranks that meet at named points; implemented by `offbeat.sync.sync.Sync`."""

    def sum_scalars(self, name: str, values: Mapping[str, float]) -> dict[str, float]:
        """Sum each value over the ranks; collective."""
        ...

    def max_scalars(self, name: str, values: Mapping[str, float]) -> dict[str, float]:
        """Return each value's maximum over the ranks; collective."""
        ...


@dataclass(frozen=True)
class StatsPart:
    """Statistics collected in one place, before any division, so that parts add up exactly.

    Attributes:
        means: by name, the sum of the values and their number.
        minima: minima by name; infinity if there was no value.
        maxima: maxima by name; minus infinity if there was no value.
    """

    sums: dict[str, float] = field(default_factory=dict)
    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    minima: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All names, whether they have a value or not."""
        return [*self.sums, *self.means, *self.minima, *self.maxima]

    def values(self) -> dict[str, float]:
        """Return the statistics by name. A mean, minimum or maximum of no values has no entry; a sum of no values is 0."""
        return {
            **self.sums,
            **{name: total / count for name, (total, count) in self.means.items() if count},
            **{name: value for name, value in self.minima.items() if value != np.inf},
            **{name: value for name, value in self.maxima.items() if value != -np.inf},
        }


class StatsTracker:
    """Collects named statistics until `take` or `export_all`.

    Values and masks are numbers, numpy arrays or torch tensors. A name keeps one kind: mean, sum, min or max.

        with tracker.scope("train"):
            tracker.denominator(tokens=mask)
            tracker.stat(denominator="tokens", entropy=entropy)         # train/entropy: mean where the mask is true
            tracker.stat(denominator="tokens", reduce="max", gap=gap)
            tracker.scalar(lr=1e-5)
        stats = tracker.export_all(reduce_group=groups.sync).values()
    """

    def __init__(self) -> None:
        self._prefix = ""
        self._masks: dict[str, Any] = {}
        self._collected: dict[tuple[str, str], Any] = {}  # (field, name) -> a float, or a 0-dimensional tensor on its device
        self._kinds: dict[str, Reduce] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put `name/` before every name within; scopes nest."""
        outer, self._prefix = self._prefix, f"{self._prefix}{name}/"
        try:
            yield
        finally:
            self._prefix = outer

    def denominator(self, **masks: Any) -> None:
        """Define masks by name: the values that follow count where the mask is not 0.

        A mask is an array or tensor of any shape and dtype. The number of its elements that are not 0 is collected as well, as a sum.
        """
        for name, mask in masks.items():
            full_name = self._prefix + name
            chosen = mask if _is_tensor(mask) else np.asarray(mask)
            chosen = chosen != 0
            self._masks[full_name] = chosen, (count := _total(chosen))
            self._set_kind(full_name, "sum")
            self._add("sum", full_name, count)

    def stat(
        self, values: Mapping[str, Any] | None = None, /, *, reduce: Reduce = "mean", denominator: str | None = None,
        where: Any = None, **more: Any,
    ) -> None:
        """Collect elements.

        Args:
            values: elements by name, like the other keywords; arrays or tensors of any shape and numeric dtype.
            reduce: how elements become one number, here and over ranks.
            denominator: name of a mask of the same shape, defined in this scope; elements where it is 0 are left out. A mean is over the
                remaining elements. None takes all elements.
            where: in place of a denominator, a mask of the same shape that is no statistic itself; elements where it is 0 are left out.

        Raises:
            ValueError: there is no such denominator, the shapes differ, or the name was collected in another way before.
        """
        if reduce not in get_args(Reduce):
            raise ValueError(f"reduce must be one of {', '.join(get_args(Reduce))}, got {reduce!r}")
        mask, count = (None, None) if denominator is None else self._mask(self._prefix + denominator)
        if where is not None:
            mask = (where if _is_tensor(where) else np.asarray(where)) != 0
            count = _total(mask)
        for name, elements in {**(values or {}), **more}.items():
            self._collect(self._prefix + name, elements, mask, reduce, count=count)

    def scalar(self, **values: float) -> None:
        """Collect numbers that are the same on every rank, such as the learning rate; repeated values are averaged."""
        for name, value in values.items():
            self._collect(self._prefix + name, value, None, "mean")

    def take(self) -> StatsPart:
        """Return the statistics since the last call, read back from the device at once, and empty the tracker."""
        found = _read_values(self._collected)
        self._collected, self._kinds, self._masks = {}, {}, {}

        def of(kind: str) -> dict[str, float]:
            return {name: value for (key, name), value in found.items() if key == kind}

        counts = of("count")
        return StatsPart(
            sums=of("sum"), means={name: (total, counts[name]) for name, total in of("total").items()},
            minima={name: -value for name, value in of("min").items()}, maxima=of("max"))

    def export_all(self, reduce_group: ReduceGroup, *, point: str = "stats") -> StatsPart:
        """Return the statistics of all ranks of `reduce_group`, and empty the tracker; collective, see `reduce`."""
        return reduce(self.take(), reduce_group, point=point)

    def _mask(self, full_name: str) -> tuple[Any, Any]:
        """Return a mask and the number of its elements that are true."""
        if full_name not in self._masks:
            raise ValueError(f"there is no denominator {full_name!r}, only {sorted(self._masks)}; call denominator() before stat()")
        return self._masks[full_name]

    def _collect(self, name: str, given: Any, mask: Any, kind: Reduce, *, count: Any = None) -> None:
        elements = given.detach() if _is_tensor(given) else np.asarray(given)
        _check_alike(name, elements, mask)
        self._set_kind(name, kind)
        match kind:
            case "sum":
                self._add("sum", name, _total(elements, mask))
            case "mean":
                self._add("total", name, _total(elements, mask))
                self._add("count", name, float(_size(elements)) if mask is None else count)
            case "max":
                self._raise_to("max", name, _largest(elements, mask))
            case "min":
                self._raise_to("min", name, _largest(-_double(elements), mask))

    def _set_kind(self, name: str, kind: Reduce) -> None:
        if self._kinds.setdefault(name, kind) != kind:
            raise ValueError(f"{name!r} was collected as {self._kinds[name]} and now as {kind}; give one of them another name")

    def _add(self, kind: str, name: str, value: Any) -> None:
        self._collected[kind, name] = self._collected.get((kind, name), 0.0) + value

    def _raise_to(self, kind: str, name: str, value: Any) -> None:
        self._collected[kind, name] = _larger(self._collected.get((kind, name), -np.inf), value)


def reduce(part: StatsPart, group: ReduceGroup, *, point: str) -> StatsPart:
    """Join the parts of all ranks, with the same result on every rank; collective, at the points `point`_maxima and `point`_sums.

    Raises:
        ValueError: the ranks have not collected the same names; a rank without values must collect an empty array.
    """
    # The names with a leading space sort first, so that ranks whose names differ in number still compare these two.
    digest = zlib.crc32(repr(sorted(part.names)).encode())
    largest = group.max_scalars(f"{point}_maxima", {
        " names": digest, " -names": -digest,
        **{f"max {name}": value for name, value in part.maxima.items()},
        **{f"min {name}": -value for name, value in part.minima.items()},
    })
    if largest[" names"] != -largest[" -names"]:
        raise ValueError(
            f"the ranks have collected different statistics for {point!r}, this one {sorted(part.names)}; a rank that has no values for "
            "a name must collect an empty array")
    sums = group.sum_scalars(f"{point}_sums", {
        **{f"sum {name}": value for name, value in part.sums.items()},
        **{f"total {name}": total for name, (total, _) in part.means.items()},
        **{f"count {name}": count for name, (_, count) in part.means.items()},
    })
    return StatsPart(
        sums={name: sums[f"sum {name}"] for name in part.sums},
        means={name: (sums[f"total {name}"], sums[f"count {name}"]) for name in part.means},
        minima={name: -largest[f"min {name}"] for name in part.minima},
        maxima={name: largest[f"max {name}"] for name in part.maxima})


def combine(parts: Sequence[StatsPart]) -> StatsPart:
    """Join parts held in one process, such as the parts of minibatches or the replies of workers. A missing name adds nothing."""
    sums: dict[str, float] = {}
    means: dict[str, tuple[float, float]] = {}
    minima: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for part in parts:
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, (total, count) in part.means.items():
            total_before, count_before = means.get(name, (0.0, 0.0))
            means[name] = (total_before + total, count_before + count)
        for name, value in part.minima.items():
            minima[name] = float(np.minimum(minima.get(name, np.inf), value))
        for name, value in part.maxima.items():
            maxima[name] = float(np.maximum(maxima.get(name, -np.inf), value))
    return StatsPart(sums, means, minima, maxima)


# Tensors are recognized by their methods. Until `_read_values`, everything below only queues work on a tensor's device.


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach")


def _size(elements: Any) -> int:
    return elements.numel() if _is_tensor(elements) else elements.size


def _double(elements: Any) -> Any:
    return elements.double() if _is_tensor(elements) else elements.astype(np.float64)


def _check_alike(name: str, elements: Any, mask: Any) -> None:
    if mask is not None and (_is_tensor(elements) != _is_tensor(mask) or tuple(elements.shape) != tuple(mask.shape)):
        raise ValueError(
            f"{name!r} is a {type(elements).__name__} of shape {tuple(elements.shape)} and its denominator a {type(mask).__name__} of "
            f"shape {tuple(mask.shape)}; both must be of one kind and shape")


def _fill(elements: Any, mask: Any, value: float) -> Any:
    """Convert elements to float64, of the same shape, with `value` where the mask is false."""
    doubles = _double(elements)
    if mask is None:
        return doubles
    # Not by boolean indexing, because the host would have to wait for the size of the result.
    return doubles.masked_fill(~mask, value) if _is_tensor(doubles) else np.where(mask, doubles, value)


def _total(elements: Any, mask: Any = None) -> Any:
    total = _fill(elements, mask, 0.0).sum()
    return total if _is_tensor(total) else float(total)


def _largest(elements: Any, mask: Any) -> Any:
    if not _size(elements):
        return -np.inf
    largest = _fill(elements, mask, -np.inf).max()
    return largest if _is_tensor(largest) else float(largest)


def _larger(a: Any, b: Any) -> Any:
    if _is_tensor(a) and _is_tensor(b):
        return a.maximum(b)
    if _is_tensor(a) or _is_tensor(b):
        tensor, number = (a, b) if _is_tensor(a) else (b, a)
        return tensor.clamp(min=number)
    return float(np.maximum(a, b))


def _read_values(values: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], float]:
    """Return all values as floats, with one transfer per device."""
    found = {key: 0.0 if _is_tensor(value) else float(value) for key, value in values.items()}
    by_device: dict[str, list[tuple[str, str]]] = {}
    for key, value in values.items():
        if _is_tensor(value):
            by_device.setdefault(str(value.device), []).append(key)
    for keys in by_device.values():
        vector = values[keys[0]].new_empty(len(keys))
        for i, key in enumerate(keys):
            vector[i] = values[key]
        found |= zip(keys, vector.tolist(), strict=True)
    return found
