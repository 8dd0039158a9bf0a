"""One judge's verdict reaches all ranks."""

import random
import threading
import time
from types import SimpleNamespace

import pytest

from meeting import meeting, together
from offbeat.errors import PeerError, StuckError, SyncMismatch, SyncTimeout
from offbeat.pulse import Vigil, waiting, work
from offbeat.sync.points import StoreKeys
from waiting import wait_until

SOON_S = 20
"""At once, on a machine that may be busy; what waits for a deadline, of 60 s, takes longer."""


def test_ranks_whose_deadlines_pass_at_once_raise_one_verdict():
    with meeting(4) as (syncs, _):
        errors = together(syncs[:3], lambda sync: sync.arrive("save", timeout_s=1.5))
        late = together(syncs[3:], lambda sync: sync.arrive("save", timeout_s=1.5))
        assert {type(error) for error in errors + late} == {SyncTimeout}
        assert len({str(error) for error in errors + late}) == 1
        assert "with 3 of 4 ranks there: rank 3 is slow" in str(late[0])
        assert together(syncs, lambda sync: sync.arrive("save", timeout_s=30)) == [None] * 4


def test_points_whose_deadlines_pass_while_ranks_come_end_alike_on_all():
    """Half of the ranks come about when the deadline of the others passes, many times over; one point is sure to be missed, one passed."""
    first_is_late = threading.Event()

    def come(sync):
        jitter = random.Random(sync.rank)
        outcomes = []
        for i in range(40):
            time.sleep(jitter.uniform(0, 0.02))
            if i == 0 and sync.rank == 2:
                assert first_is_late.wait(30)
            try:
                outcomes.append(sync.arrive(f"point {i}", timeout_s=30 if i == 1 else 0.01))
            except SyncTimeout as exc:
                outcomes.append(str(exc))
                first_is_late.set()
        return outcomes

    with meeting(3) as (syncs, _):
        first, second, third = together(syncs, come)
        assert first == second == third
        assert first[0] is not None and first[1] is None


def test_a_rank_that_has_left_is_named():
    with meeting(3, answer_timeout_s=1.0) as (syncs, _):
        together(syncs, lambda sync: sync.arrive("last", timeout_s=30))
        syncs[1].close()
        errors = together([syncs[0], syncs[2]], lambda sync: sync.arrive("one more", timeout_s=0.3))
        assert {str(error) for error in errors} == {"sync point 'one more' cannot be passed: rank 1 has left"}


def test_failures_at_the_same_time_have_one_winner():
    def fail_and_come(sync):
        sync.fail(f"reason {sync.rank}")
        sync.arrive("save", timeout_s=30)

    with meeting(3) as (syncs, _):
        syncs[0].check()
        errors = together(syncs, fail_and_come)
        for sync in syncs:
            with pytest.raises(PeerError, match=r"^the run cannot go on: rank \d failed: reason \d; this rank had come as far as"):
                sync.check()
        assert {type(error) for error in errors} == {PeerError}
        assert len({str(error) for error in errors}) == 1


def test_a_rank_that_ends_because_of_another_does_not_say_that_it_failed_itself():
    with meeting(2) as (syncs, _):
        (error,) = together(syncs[:1], lambda sync: sync.arrive("save", timeout_s=0.5))
        syncs[0].pass_on(error)
        with pytest.raises(PeerError) as caught:
            wait_until(lambda: syncs[1].check(), timeout_s=SOON_S)
        assert str(caught.value).startswith(
            "the run cannot go on: sync point 'save' timed out after 0.5 s with 1 of 2 ranks there: rank 1 is ")
        assert "rank 0 failed" not in str(caught.value)


def test_an_exception_in_a_region_goes_on_and_is_told_to_the_peers():
    def step(sync):
        with sync.region("step", timeout_s=30):
            if sync.rank == 1:
                raise ValueError("no such token")
        started = time.monotonic()
        try:
            sync.arrive("save", timeout_s=60)
        finally:
            assert time.monotonic() - started < SOON_S

    with meeting(3) as (syncs, _):
        errors = together(syncs, step)
        assert isinstance(errors[1], ValueError)
        assert str(errors[0]) == str(errors[2]) == "sync point 'save' cannot be passed: rank 1 failed: ValueError: no such token"


def test_a_broken_collective_without_a_suspect_stays_as_it_is():
    inside = threading.Barrier(2)

    def step(sync):
        with sync.region("step", timeout_s=30):
            inside.wait(30)
            raise RuntimeError("gloo: timed out")

    with meeting(2) as (syncs, _):
        assert [str(error) for error in together(syncs, step)] == ["gloo: timed out"] * 2


def test_a_rank_that_stays_in_a_broken_collective_is_named():
    inside, told = threading.Barrier(2), threading.Barrier(3)

    def step(sync):
        try:
            with sync.region("step", timeout_s=30):
                if sync.rank == 1:
                    told.wait(30)
                    return
                inside.wait(30)
                raise RuntimeError("gloo: timed out")
        finally:
            if sync.rank != 1:
                told.wait(30)

    with meeting(3) as (syncs, _):
        first, _, third = together(syncs, step)
        assert isinstance(first, PeerError)
        assert str(first) == str(third)
        with pytest.raises(PeerError, match="'save' cannot be passed: a collective after sync point 'step' broke"):
            syncs[1].arrive("save", timeout_s=30)
        assert str(first).startswith(
            "sync point 'step' cannot be passed: a collective after sync point 'step' broke (gloo: timed out): rank 1 is slow, for ")


def test_an_error_of_the_blocks_own_is_not_taken_for_a_broken_collective():
    inside = threading.Barrier(3)

    def step(sync):
        with sync.region("step", timeout_s=30):
            inside.wait(timeout=SOON_S)
            if sync.rank == 1:
                raise TimeoutError("the upload timed out: connection reset")
            time.sleep(0.3)
        sync.arrive("save", timeout_s=30)

    with meeting(3) as (syncs, _):
        errors = together(syncs, step)
        assert isinstance(errors[1], TimeoutError)
        assert {str(error) for error in (errors[0], errors[2])} == {
            "sync point 'save' cannot be passed: rank 1 failed: TimeoutError: the upload timed out: connection reset"}


def test_an_interrupted_wait_is_given_up_for_all():
    def come(sync):
        if sync.rank == 1:
            sync._await = _interrupt
        else:
            wait_until(lambda: store.check([StoreKeys().result(1)]), timeout_s=30)
        try:
            sync.arrive("save", timeout_s=60)
        finally:
            sync.__dict__.pop("_await", None)

    def _interrupt(wait):
        syncs[1]._arrivals.waits.put(wait)
        wait_until(lambda: store.check([StoreKeys().count(1)]), timeout_s=30)
        raise KeyboardInterrupt

    with meeting(3) as (syncs, store):
        started = time.monotonic()
        errors = together(syncs, come)
        assert isinstance(errors[1], KeyboardInterrupt)
        assert [type(errors[0]), str(errors[0])] == [type(errors[2]), str(errors[2])]
        assert isinstance(errors[0], SyncTimeout)
        assert "rank 1 was interrupted while it waited (KeyboardInterrupt)" in str(errors[0])
        assert time.monotonic() - started < SOON_S
        assert together(syncs, lambda sync: sync.arrive("save", timeout_s=30)) == [None] * 3


def test_a_judge_that_breaks_tells_all():
    def break_down(case):
        raise KeyError("unforeseen")

    with meeting(2) as (syncs, _):
        syncs[1]._judge._on_missed = break_down
        error, = together(syncs[1:], lambda sync: sync.arrive("save", timeout_s=0.2))
        assert str(error) == "sync point 'save' cannot be passed: rank 1 failed: its sync broke: KeyError: 'unforeseen'"
        wait_until(lambda: syncs[0]._board.failure is not None, timeout_s=20)
        errors = together(syncs, lambda sync: sync.arrive("save", timeout_s=30))
        assert {str(each) for each in errors} == {str(error)}


def test_a_verdict_that_its_owner_does_not_write_is_written_by_the_next():
    written = threading.Event()
    with meeting(3, answer_timeout_s=1.0) as (syncs, _):
        collect = syncs[0]._judge._collect

        def collect_late(*arguments, **options):
            written.wait(30)
            return collect(*arguments, **options)

        syncs[0]._judge._collect = collect_late
        errors = together(syncs[:2], lambda sync: sync.arrive("save", timeout_s=0.8 + 0.5 * sync.rank))
        written.set()
        late, = together(syncs[2:], lambda sync: sync.arrive("save", timeout_s=30))
        assert str(errors[0]) == str(errors[1]) == str(late)
        assert "2 of 3 ranks there: rank 2 is slow" in str(late)


def test_values_under_different_keys_are_a_mismatch_at_once():
    with meeting(3) as (syncs, _):
        own = [{"kl": 1.0, "loss": 2.0}, {"loss": 1.0}, {"loss": 1.0}]
        errors = together(syncs, lambda sync: sync.sum_scalars("sums", own[sync.rank], timeout_s=60))
        assert {type(error) for error in errors} == {SyncMismatch}
        assert str(errors[0]).startswith("ranks came to different sync points at once: ")
        assert "came to 'sums' with loss" in str(errors[0])
        assert "rank 0 came to 'sums' with kl, loss" in str(errors[0])


def test_patience_does_not_delay_a_mismatch():
    def come(sync):
        for _ in range(10):
            syncs[0].beat()
            time.sleep(0.05)
        return sync.arrive("other", timeout_s=60) if sync.rank == 2 else sync.arrive("prompts", timeout_s=60, patient_with=(0,))

    with meeting(3) as (syncs, _):
        started = time.monotonic()
        errors = together(syncs[1:], come)
        assert {type(error) for error in errors} == {SyncMismatch}
        assert time.monotonic() - started < SOON_S
        late, = together(syncs[:1], lambda sync: sync.arrive("prompts", timeout_s=30, patient_with=(0,)))
        assert str(late) == str(errors[0])


def test_a_rank_that_has_left_cannot_come():
    with meeting(2) as (syncs, _):
        syncs[1].close()
        with pytest.raises(PeerError, match="'save' cannot be passed: this rank has left"):
            syncs[1].arrive("save")


def test_a_rank_that_hangs_is_told_to_all_also_to_those_that_wait_nowhere():
    heard = []
    with meeting(3) as (syncs, _):
        syncs[2]._listener = SimpleNamespace(give_up=heard.append)
        syncs[1].hang("rank 1 hangs in 'train_step'")
        errors = together(syncs[:2], lambda sync: sync.arrive("save", timeout_s=30))
        assert {(type(error), str(error)) for error in errors} == {(StuckError, "rank 1 hangs in 'train_step'")}
        wait_until(lambda: heard, timeout_s=30)
        assert str(heard[0]) == "rank 1 hangs in 'train_step'"
        with pytest.raises(StuckError, match="^rank 1 hangs in 'train_step'$"):
            syncs[2].check()


def test_ranks_that_wait_for_one_that_has_left_the_region_are_told_where():
    def step(sync):
        sync.arrive("start", timeout_s=30)
        with sync.region("step", timeout_s=30):
            if sync.rank == 1:
                with work("train_step"), waiting():
                    wait_until(lambda: sync._board.failure, timeout_s=20)
        sync.check()

    with meeting(2, sync_timeout_s=0.5) as (syncs, _):
        vigil = Vigil(SimpleNamespace(beat=lambda _text: None, hangs=lambda hang: pytest.fail(str(hang))), patience_s=0.5)
        try:
            errors = together(syncs, step)
        finally:
            vigil.close()
        assert isinstance(errors[1], StuckError)
        assert str(errors[1]).startswith("rank 1 waits in a collective of region 'step' and has not got on for ")
        assert " s: rank 0 has left it\n  rank 1, innermost call last:\n" in str(errors[1])


class Late:
    """A collective that completes just as a short wait for it ends."""

    def wait(self, timeout=None):
        if timeout is not None:
            raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return True


def test_a_collective_that_completes_as_a_slice_of_the_wait_ends_has_succeeded():
    with meeting(1) as (syncs, _):
        syncs[0]._finish(Late())
