"""One judge's verdict reaches all ranks."""

import random
import time

import pytest

from meeting import meeting, together
from offbeat.errors import PeerError, SyncTimeout


def test_ranks_whose_deadlines_pass_at_once_raise_one_verdict():
    with meeting(4) as (syncs, _):
        errors = together(syncs[:3], lambda sync: sync.arrive("save", timeout_s=0.3))
        late = together(syncs[3:], lambda sync: sync.arrive("save", timeout_s=0.3))
        assert {type(error) for error in errors + late} == {SyncTimeout}
        assert len({str(error) for error in errors + late}) == 1
        assert "with 3 of 4 ranks there: rank 3 is slow" in str(late[0])
        assert together(syncs, lambda sync: sync.arrive("save", timeout_s=5)) == [None] * 4


def test_points_whose_deadlines_pass_while_ranks_come_end_alike_on_all():
    """Half of the ranks come about when the deadline of the others passes, many times over."""
    def come(sync):
        jitter = random.Random(sync.rank)
        outcomes = []
        for i in range(40):
            time.sleep(jitter.uniform(0, 0.02))
            try:
                outcomes.append(sync.arrive(f"point {i}", timeout_s=0.01))
            except SyncTimeout as exc:
                outcomes.append(str(exc))
        return outcomes

    with meeting(3) as (syncs, _):
        first, second, third = together(syncs, come)
        assert first == second == third
        assert 0 < first.count(None) < 40


def test_a_rank_that_has_left_is_named():
    with meeting(3) as (syncs, _):
        together(syncs, lambda sync: sync.arrive("last", timeout_s=5))
        syncs[1].close()
        errors = together([syncs[0], syncs[2]], lambda sync: sync.arrive("one more", timeout_s=0.3))
        assert {str(error) for error in errors} == {"sync point 'one more' cannot be passed: rank 1 has left"}


def test_failures_at_the_same_time_have_one_winner():
    def fail_and_come(sync):
        sync.fail(f"reason {sync.rank}")
        sync.arrive("save", timeout_s=5)

    with meeting(3) as (syncs, _):
        syncs[0].check()
        errors = together(syncs, fail_and_come)
        for sync in syncs:
            with pytest.raises(PeerError, match=r"^the run cannot go on: rank \d failed: reason \d$"):
                sync.check()
        assert {type(error) for error in errors} == {PeerError}
        assert len({str(error) for error in errors}) == 1


def test_an_exception_in_a_region_goes_on_and_is_told_to_the_peers():
    def step(sync):
        with sync.region("step", timeout_s=5):
            if sync.rank == 1:
                raise ValueError("no such token")
        started = time.monotonic()
        try:
            sync.arrive("save", timeout_s=30)
        finally:
            assert time.monotonic() - started < 5

    with meeting(3) as (syncs, _):
        errors = together(syncs, step)
        assert isinstance(errors[1], ValueError)
        assert str(errors[0]) == str(errors[2]) == "sync point 'save' cannot be passed: rank 1 failed: ValueError: no such token"


def test_a_broken_collective_without_a_suspect_stays_as_it_is():
    def step(sync):
        with sync.region("step", timeout_s=5):
            raise RuntimeError("gloo: timed out")

    with meeting(2) as (syncs, _):
        assert [str(error) for error in together(syncs, step)] == ["gloo: timed out"] * 2


def test_a_rank_that_stays_in_a_broken_collective_is_named():
    def step(sync):
        with sync.region("step", timeout_s=5):
            if sync.rank == 1:
                time.sleep(1.5)
                return
            raise RuntimeError("gloo: timed out")

    with meeting(3) as (syncs, _):
        first, _, third = together(syncs, step)
        assert isinstance(first, SyncTimeout)
        assert str(first) == str(third)
        assert str(first).startswith("a collective after sync point 'step' broke (gloo: timed out): rank 1 is slow, for ")
