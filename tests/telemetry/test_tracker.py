"""Collected statistics against slow numpy over all elements at once; over micro-batches, ranks, minibatches and workers."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from offbeat.data import wire
from offbeat.telemetry.tracker import StatsPart, StatsTracker, combine, reduce
from ranks import run_ranks

SIZES = {0: [5, 0, 7], 1: [3], 2: [0]}  # rank -> elements of its micro-batches


def elements(rank, size):
    rng = np.random.default_rng([rank, size])
    return rng.normal(size=size).astype(np.float32), rng.random(size) < 0.6


def collect(tracker, rank, convert=lambda array: array):
    for size in SIZES[rank]:
        values, mask = (convert(array) for array in elements(rank, size))
        with tracker.scope("train"):
            tracker.denominator(tokens=mask)
            tracker.stat(denominator="tokens", entropy=values)
            tracker.stat(reduce="sum", loss=values)
            tracker.stat({"gap_max": values}, denominator="tokens", reduce="max")
            with tracker.scope("deep"):
                tracker.stat(reduce="min", least=values)
                tracker.stat(mean=values)
    with tracker.scope("train"):
        tracker.scalar(lr=0.25)


def slow(ranks):
    """The same from all elements of all these ranks, at once."""
    pairs = [elements(rank, size) for rank in ranks for size in SIZES[rank]]
    values = np.concatenate([values for values, _ in pairs]).astype(np.float64)
    chosen = values[np.concatenate([mask for _, mask in pairs])]
    every = {"train/tokens": float(len(chosen)), "train/loss": values.sum(), "train/lr": 0.25}
    if len(chosen):
        every |= {"train/entropy": chosen.mean(), "train/gap_max": chosen.max()}
    if len(values):
        every |= {"train/deep/least": values.min(), "train/deep/mean": values.mean()}
    return every


def test_what_micro_batches_gave_is_what_all_elements_give_at_once():
    for convert in (np.asarray, lambda array: torch.from_numpy(array).requires_grad_(array.dtype == np.float32)):
        for rank in SIZES:
            tracker = StatsTracker()
            collect(tracker, rank, convert)
            assert tracker.take().values() == pytest.approx(slow([rank]), rel=1e-12)
            assert tracker.take().values() == {}


def over_ranks(groups, ranks):
    tracker = StatsTracker()
    collect(tracker, ranks[groups.rank], torch.from_numpy)
    return tracker.export_all(reduce_group=groups.sync).values()


def parts_of(ranks):
    for rank in ranks:
        tracker = StatsTracker()
        collect(tracker, rank)
        yield wire.decode(StatsPart, wire.encode(tracker.take()))


@pytest.mark.parametrize("ranks", [(0, 1), (0, 2)], ids=["unequal", "one_empty"])
def test_ranks_of_a_group_and_replies_of_workers_give_the_same_exact_statistics(ranks):
    shown = run_ranks(over_ranks, world=2, argument=ranks)
    assert shown[0] == shown[1]
    assert shown[0] == combine(list(parts_of(ranks))).values() == pytest.approx(slow(ranks), rel=1e-12)


def test_parts_without_a_name_add_nothing_to_it():
    parts = [StatsPart(sums={"a": 1.0}), StatsPart(means={"b": (6.0, 3.0)}), StatsPart(sums={"a": 2.0}, maxima={"c": -1.0})]
    assert combine(parts).values() == {"a": 3.0, "b": 2.0, "c": -1.0}
    assert combine([]).values() == {}


def with_names(groups, names_by_rank):
    tracker = StatsTracker()
    tracker.stat({name: np.ones(2) for name in names_by_rank[groups.rank]})
    try:
        return reduce(tracker.take(), groups.sync, point="train").values()
    except ValueError as exc:
        return str(exc)


def test_ranks_with_different_names_are_refused_on_every_rank():
    for text, name in zip(run_ranks(with_names, world=2, argument=[["a", "b"], ["a"]]), ("'b'", "'a'"), strict=True):
        assert "different statistics for 'train'" in text and name in text


def test_values_left_out_by_a_mask_do_not_count_even_if_they_are_nan():
    for convert in (np.array, torch.tensor):
        tracker = StatsTracker()
        tracker.denominator(n=convert([1, 0, 1]))
        for kind in ("mean", "sum", "min", "max"):
            tracker.stat({kind: convert([1.0, math.nan, 3.0])}, reduce=kind, denominator="n")
        assert tracker.take().values() == {"n": 2.0, "mean": 2.0, "sum": 4.0, "min": 1.0, "max": 3.0}


def test_a_mask_that_is_no_statistic_leaves_values_out_as_a_denominator_does():
    for convert in (np.asarray, torch.from_numpy):
        tracker = StatsTracker()
        tracker.stat({"mean": convert(np.array([1.0, np.nan, 4.0]))}, where=convert(np.array([True, False, True])))
        tracker.stat({"mean": convert(np.array([1.0]))}, where=convert(np.array([False])))
        assert tracker.take() == StatsPart(means={"mean": (5.0, 2.0)})


def test_a_nan_that_counts_is_shown():
    tracker = StatsTracker()
    for kind in ("mean", "sum", "min", "max"):
        tracker.stat({kind: torch.tensor([1.0, math.nan])}, reduce=kind)
        tracker.stat({kind: 2.0}, reduce=kind)
    assert all(math.isnan(value) for value in tracker.take().values().values())


def test_no_values_have_no_mean_minimum_or_maximum():
    tracker = StatsTracker()
    tracker.denominator(n=np.zeros(3, bool))
    for kind in ("mean", "sum", "min", "max"):
        tracker.stat({kind: np.ones(3)}, reduce=kind, denominator="n")
    assert tracker.take().values() == {"n": 0.0, "sum": 0.0}


def test_tensors_and_numbers_mix_under_one_name():
    tracker = StatsTracker()
    for value in (1.0, torch.tensor([5.0, -2.0]), 3.0):
        tracker.stat(reduce="max", high=value)
        tracker.stat(reduce="min", low=value)
        tracker.stat(mean=value)
    assert tracker.take().values() == {"high": 5.0, "low": -2.0, "mean": 1.75}


class Unreadable(torch.Tensor):
    """A tensor that may be computed with, but not read back."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func.__name__ not in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy", "nonzero"), f"{func} reads back"
        return super().__torch_function__(func, types, args, kwargs or {})


def test_nothing_is_read_back_before_the_end():
    tracker = StatsTracker()
    collect(tracker, 0, lambda array: torch.from_numpy(array).as_subclass(Unreadable))
    with pytest.raises(AssertionError, match="reads back"):
        tracker.take()


def test_mistakes_are_told():
    tracker = StatsTracker()
    with tracker.scope("train"), pytest.raises(ValueError, match=r"no denominator 'train/n', only \[\]; call denominator\(\) before stat"):
        tracker.stat(denominator="n", a=1.0)
    tracker.denominator(n=np.ones(3))
    with pytest.raises(ValueError, match=r"'a' is a ndarray of shape \(2,\) and its denominator a ndarray of shape \(3,\)"):
        tracker.stat(denominator="n", a=np.ones(2))
    with pytest.raises(ValueError, match="'a' is a Tensor .* both must be of one kind"):
        tracker.stat(denominator="n", a=torch.ones(3))
    tracker.stat(b=1.0)
    with pytest.raises(ValueError, match="'b' was collected as mean and now as sum; give one of them another name"):
        tracker.stat(reduce="sum", b=1.0)
    with pytest.raises(ValueError, match="reduce must be one of mean, sum, min, max, got 'median'"):
        tracker.stat(reduce="median", c=1.0)


def test_a_scope_ends_with_its_block_even_after_an_error():
    tracker = StatsTracker()
    with pytest.raises(RuntimeError), tracker.scope("a"):
        raise RuntimeError
    tracker.scalar(x=1.0)
    assert tracker.take().values() == {"x": 1.0}


def test_tracking_needs_no_torch():
    code = (
        "import sys, numpy as np; from offbeat.telemetry.tracker import StatsTracker; t = StatsTracker(); t.stat(a=np.ones(2)); "
        "assert t.take().values() == {'a': 1.0}; assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
