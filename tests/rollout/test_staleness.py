"""The bound of the gate over random histories, and its formula by hand."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.rollout.staleness import Gate


def fill(gate: Gate, start: int = 0) -> list[int]:
    keys = list(range(start, start + gate.capacity))
    for key in keys:
        gate.admit(key)
    return keys


def test_capacity_is_the_smaller_of_concurrency_and_staleness() -> None:
    assert Gate(batch_size=4, max_running=100, eta=2).capacity == 12
    assert Gate(batch_size=4, max_running=5, eta=2).capacity == 5
    gate = Gate(batch_size=4, max_running=100, eta=0)
    for key in fill(gate):
        gate.finish(key)
    assert gate.take() is not None
    assert gate.capacity == 0  # the batch in training still counts: at eta = 0 nothing may start on the old version
    gate.advance(1)
    assert gate.capacity == 0  # nor while an engine has the old version
    gate.serve(1)
    assert gate.capacity == 4


def test_a_group_of_an_earlier_process_keeps_its_deadline_where_a_step_can_still_take_it_in_time() -> None:
    gate = Gate(batch_size=2, max_running=10, eta=1, version=4)
    assert [gate.admit(key, since=3) for key in (0, 1)] == [3, 3]  # due at version 4, whose step takes two
    assert gate.admit(2, since=3) == 4
    assert gate.admit(3, since=None) == 4
    assert gate.running == {0: 4, 1: 4, 2: 5, 3: 5}
    gate = Gate(batch_size=2, max_running=10, eta=1, version=4)
    assert gate.admit(0, since=2) == 4  # its tokens are too old
    gate = Gate(batch_size=2, max_running=10, eta=1, version=4, on_stale="keep")
    assert gate.admit(0, since=2) == 2


def test_a_step_is_taken_ahead_at_the_version_that_it_will_train_on() -> None:
    gate = Gate(batch_size=2, max_running=10, eta=1)
    fill(gate)  # four groups, all due at version 1
    for key in (0, 1, 2):
        gate.finish(key)
    assert gate.take() == [0, 1]
    assert gate.take_ahead() is None  # too few are ready
    gate.finish(3)
    assert gate.take_ahead() == [2, 3]
    assert (gate.training, gate.ahead, gate.capacity) == (2, 2, 0)
    gate.advance(1)
    gate.serve(1)
    assert (gate.training, gate.ahead, gate.capacity) == (2, 0, 2)


def test_a_step_ahead_waits_for_what_is_due_when_it_trains() -> None:
    gate = Gate(batch_size=2, max_running=10, eta=2)
    fill(gate)  # 0 to 5, due at version 2
    for key in (0, 1):
        gate.finish(key)
    assert gate.take() == [0, 1]
    gate.advance(1)
    gate.serve(1)
    fill(gate, 6)  # 6 and 7, due at version 3
    for key in (2, 3):
        gate.finish(key)
    assert gate.take() == [2, 3]
    for key in (6, 7):
        gate.finish(key)
    assert gate.take_ahead() is None  # 4 and 5 are due at version 2, when it trains
    for key in (4, 5):
        gate.finish(key)
    assert gate.take_ahead() == [4, 5]


def test_nothing_is_taken_ahead_of_a_step_that_has_been_trained() -> None:
    gate = Gate(batch_size=2, max_running=10, eta=1)
    fill(gate)  # four groups, all due at version 1
    for key in (0, 1):
        gate.finish(key)
    assert gate.take() == [0, 1] and gate.take_ahead() is None
    gate.advance(1)
    for key in (2, 3):
        gate.finish(key)
    assert gate.take_ahead() is None  # they are for the step that begins next
    assert gate.take() == [2, 3]


def test_nothing_is_taken_ahead_in_synchronous_training() -> None:
    gate = Gate(batch_size=2, max_running=10, eta=0)
    for key in fill(gate):
        gate.finish(key)
    assert gate.take() == [0, 1]
    assert gate.capacity == 0 and gate.take_ahead() is None


def test_the_bound_allows_as_many_groups_as_the_steps_up_to_a_deadline_take() -> None:
    gate = Gate(batch_size=4, max_running=100, eta=2, version=3)
    assert (gate.max_held, gate.deadline) == (12, 5)
    gate.advance(4)
    assert (gate.max_held, gate.deadline) == (8, 5)
    gate.advance(7)
    assert (gate.max_held, gate.capacity) == (-4, 0)  # engines are further behind than any step may go back
    gate.serve(7)
    assert (gate.max_held, gate.deadline) == (12, 9)


def test_nothing_is_admitted_that_no_step_would_take() -> None:
    gate = Gate(batch_size=4, max_running=100, eta=3, version=7, last_version=9)
    assert gate.capacity == 8


def test_a_step_waits_for_an_urgent_straggler() -> None:
    gate = Gate(batch_size=2, max_running=10, eta=1)
    fill(gate)  # four groups, all due at version 1
    for key in (0, 1):
        gate.finish(key)
    assert gate.take() == [0, 1]
    gate.advance(1)
    gate.serve(1)
    fill(gate, 4)  # two more, due at version 2
    for key in (4, 5):
        gate.finish(key)
    assert gate.take() is None  # groups 2 and 3 are due now
    assert gate.too_slow() == [2, 3]
    for key in (2, 3):
        gate.finish(key)
    assert gate.take() == [2, 3]


def test_keep_takes_whatever_is_ready() -> None:
    gate = Gate(batch_size=1, max_running=10, eta=0, on_stale="keep")
    gate.admit("slow")
    gate.release("slow")
    gate.admit("a")
    gate.finish("a")
    assert gate.take() == ["a"]


@pytest.mark.parametrize("on_stale", ["wait", "requeue"])
@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32), batch=st.integers(1, 6), running=st.integers(1, 30), eta=st.integers(0, 4),
    reject=st.sampled_from([0, 0.2, 0.7]), slow=st.sampled_from([0, 0.5, 0.95]), ahead=st.sampled_from([0, 0.5, 1]))
def test_the_bound_holds_and_nothing_deadlocks_in_random_histories(on_stale, seed, batch, running, eta, reject, slow, ahead) -> None:
    """Three engines take versions at their own pace, `slow` ones seldom; a group is played by any of them, turn after turn."""
    chance = random.Random(seed)
    gate = Gate(batch_size=batch, max_running=running, eta=eta, last_version=12, on_stale=on_stale)
    engines = [0, 0, 0]
    admitted: dict[int, int] = {}  # the oldest version that has sampled a token of the group
    trained: set[int] = set()
    while gate.version < 12:
        if chance.random() > slow or not (gate.running or gate.training or gate.capacity):
            engines[chance.randrange(3)] = gate.version
            gate.serve(min(engines))
        while gate.capacity and chance.random() < 0.8:
            key = len(admitted)
            admitted[key] = chance.choice(engines)
            gate.admit(key)
        for key in gate.running:
            admitted[key] = min(admitted[key], chance.choice(engines))
        assert len(gate.running) + len(gate.ready) + gate.training + gate.ahead <= (eta + 1) * batch
        assert len(gate.running) <= running
        if gate.training:
            if not gate.ahead and chance.random() < ahead and (step := gate.take_ahead()) is not None:
                assert len(step) == batch
                assert all(gate.version + 1 - admitted[key] <= eta for key in step)
                assert trained.isdisjoint(step)
                trained.update(step)
            if chance.random() < 0.5:
                gate.advance(gate.version + 1)
                continue
        elif (step := gate.take()) is not None:
            assert len(step) == batch
            assert all(gate.version - admitted[key] <= eta for key in step)
            assert trained.isdisjoint(step)
            trained.update(step)
            continue
        elif on_stale == "requeue":
            for key in gate.too_slow():
                gate.release(key)
        if gate.running:
            key = chance.choice(sorted(gate.running))
            gate.release(key) if chance.random() < reject else gate.finish(key)
        else:
            waits = min(engines) < gate.version
            assert gate.capacity or gate.training or waits, "nothing runs and nothing may start: a deadlock"
