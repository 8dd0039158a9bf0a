"""The fair queue: its bound, over random pushes and pops."""

from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.service.fair import FairQueue


@dataclass(frozen=True, eq=False)
class Job:
    owner: str
    cost: int


def push(queue: FairQueue[Job], owner: str, cost: int) -> Job:
    job = Job(owner, cost)
    queue.push(owner, cost, job)
    return job


def test_costs_are_shared_not_counts() -> None:
    queue = FairQueue[Job]()
    for _ in range(3):
        push(queue, "large", 10)
    for _ in range(30):
        push(queue, "small", 1)
    served = [queue.pop() for _ in range(22)]
    assert sum(job.cost for job in served if job.owner == "small") == 20
    assert sum(job.cost for job in served if job.owner == "large") == 20


def test_an_owner_that_was_away_saves_up_nothing() -> None:
    queue = FairQueue[Job]()
    for _ in range(100):
        push(queue, "busy", 1)
    for _ in range(50):
        queue.pop()
    for _ in range(10):
        push(queue, "late", 1)
    assert [queue.pop().owner for _ in range(4)].count("late") == 2


def test_an_owner_that_sends_one_large_item_after_another_does_not_keep_small_ones_waiting() -> None:
    queue = FairQueue[Job]()
    push(queue, "large", 1000)
    assert queue.pop().owner == "large"
    push(queue, "large", 1000)
    for _ in range(5):
        push(queue, "small", 1)
    assert [queue.pop().owner for _ in range(6)] == ["small"] * 5 + ["large"]


def test_who_may_not_be_served_now_lets_others_before_him_and_makes_up_for_it() -> None:
    queue = FairQueue[Job]()
    for owner in "aab":
        push(queue, owner, 1)
    assert queue.pop().owner == "a"
    push(queue, "b", 1)
    assert [queue.pop(lambda owner, _: owner != "a").owner for _ in range(2)] == ["b", "b"]
    with pytest.raises(LookupError, match="that may be served"):
        queue.pop(lambda owner, _: owner != "a")
    push(queue, "b", 1)
    assert set(queue.owners) == {"a", "b"} and queue.pop().owner == "a"


def test_where_nothing_waits_nothing_is_given() -> None:
    with pytest.raises(LookupError):
        FairQueue[Job]().pop()


def test_owners_that_went_away_are_forgotten() -> None:
    queue = FairQueue[Job]()
    for number in range(1000):
        push(queue, "busy", 1)
        push(queue, f"once-{number}", 1)
    while len(queue):
        queue.pop()
    assert len(queue._times) <= 2


steps = st.lists(st.one_of(
    st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(1, 50)), st.just(("pop", "", 0))), max_size=120)


@given(steps)
def test_while_two_owners_wait_they_are_served_alike_but_for_their_largest_items(steps: list[tuple[str, str, int]]) -> None:
    queue = FairQueue[Job]()
    waiting: dict[str, list[Job]] = defaultdict(list)
    # For each pair: what each was served since both began to wait.
    served: dict[tuple[str, str], list[int]] = {}
    for action, owner, number in steps:
        if action == "push":
            waiting[owner].append(push(queue, owner, number))
        elif action == "pop" and len(queue):
            job = queue.pop()
            assert job is waiting[job.owner].pop(0), "first in, first out within each owner"
            for pair, costs in served.items():
                if job.owner in pair:
                    costs[pair.index(job.owner)] += job.cost
                    assert abs(costs[0] - costs[1]) <= 100, "each owner's largest item costs at most 50"
        assert len(queue) == sum(map(len, waiting.values()))
        pairs = {(one, two) for one in "abc" for two in "abc" if one < two and waiting[one] and waiting[two]}
        served = {pair: served.get(pair, [0, 0]) for pair in pairs}


@given(steps)
def test_everything_is_served_in_the_end(steps: list[tuple[str, str, int]]) -> None:
    queue = FairQueue[Job]()
    jobs = [push(queue, owner, cost) for action, owner, cost in steps if action == "push"]
    assert {queue.pop() for _ in jobs} == set(jobs)


@given(steps, st.integers(1, 50))
def test_what_is_dropped_is_never_served_and_the_rest_is(steps: list[tuple[str, str, int]], most: int) -> None:
    queue = FairQueue[Job]()
    jobs = [push(queue, owner, cost) for action, owner, cost in steps if action == "push"]
    dropped = {job for owner in "abc" for job in queue.drop(owner, lambda job: job.cost > most)}
    assert dropped == {job for job in jobs if job.cost > most} and len(queue) == len(jobs) - len(dropped)
    assert {queue.pop() for _ in range(len(queue))} == set(jobs) - dropped and not queue.owners
