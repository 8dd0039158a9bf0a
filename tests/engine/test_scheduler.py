"""Slots stay dense and bounded, order is kept, prefill batches respect their budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.engine.cache import BUCKET
from offbeat.engine.request import Request
from offbeat.engine.scheduler import MOST_PADDING, Scheduler, plan_prefill
from offbeat.errors import BusyError, RefusedError


class NothingKnown:
    """No prompt begins like an earlier one."""

    def num_known(self, request: Request) -> int:
        return 0

    def end_of_part(self, request: Request, stop: int) -> int:
        return stop


NEW = NothingKnown()


def make(name: int, *, length: int = 3, n: int = 1) -> Request:
    return Request(id=str(name), prompt=[1] * length, n=n)


@given(st.data())
def test_random_traffic_keeps_slots_dense_bounded_and_in_order(data):
    max_running, max_queued, budget = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    per_round = data.draw(st.integers(1, budget))
    scheduler = Scheduler(
        max_running=max_running, max_queued=max_queued, max_prefill_tokens=budget, max_prefill_per_round=per_round)
    slots: list[str] = []
    computed: dict[str, int] = {}
    admitted_order: list[int] = []
    sent = 0
    for _ in range(data.draw(st.integers(1, 30))):
        for _ in range(data.draw(st.integers(0, 4))):
            request = make(sent, length=data.draw(st.integers(1, 9)), n=data.draw(st.integers(1, max_running)))
            sent += 1
            if scheduler.num_waiting == max_queued:
                with pytest.raises(BusyError):
                    scheduler.add(request)
            else:
                scheduler.add(request)
        bound = per_round if scheduler.running else budget
        round_ = scheduler.admit(NEW)
        begun, admitted = round_.begun, round_.requests
        if round_.part is not None:
            assert not admitted and 0 < round_.part.stop - round_.part.start <= bound
            assert round_.part.start == computed.get(round_.part.request.id, 0)
            computed[round_.part.request.id] = round_.part.stop
        assert sum(len(r.prompt) - computed.get(r.id, 0) for r in admitted) <= bound
        assert begun is None or (begun.stop == computed[begun.request.id] and admitted[0] is begun.request)
        for request in admitted:
            admitted_order.append(int(request.id))
            slots += [f"{request.id}.{i}" for i in range(request.n)]
        assert scheduler.running == len(slots) <= max_running
        finished = data.draw(st.sets(st.integers(0, len(slots) - 1))) if slots else set()
        survivors = {name for i, name in enumerate(slots) if i not in finished}
        sources, targets = scheduler.compact(finished)
        assert not set(sources) & set(targets)
        for source, target in zip(sources, targets, strict=True):
            slots[target] = slots[source]
        del slots[scheduler.running :]
        assert set(slots) == survivors and len(slots) == len(survivors)
    assert admitted_order == sorted(admitted_order)


@given(st.data())
def test_random_traffic_never_runs_what_may_outgrow_the_cache_and_starts_all_that_fits_alone(data):
    places = data.draw(st.integers(1, 20)) * BUCKET
    scheduler = Scheduler(max_running=16, max_queued=99, max_prefill_tokens=1000, max_cache_tokens=places)
    needs: list[int] = []
    sent: list[str] = []
    started: list[str] = []
    for name in range(data.draw(st.integers(1, 20))):
        request = make(name, length=data.draw(st.integers(1, 99)), n=data.draw(st.integers(1, 16)))
        need = -(-(len(request.prompt) + request.params.max_new_tokens) // BUCKET) * BUCKET
        if request.n * need > places:
            with pytest.raises(RefusedError, match=rf"take {request.n * need} places in the cache, which has {places}; lower n"):
                scheduler.check(request)
            continue
        scheduler.check(request)
        scheduler.add(request)
        sent.append(request.id)
    for _ in range(400):
        for request in scheduler.admit(NEW).requests:
            started.append(request.id)
            needs += [-(-(len(request.prompt) + request.params.max_new_tokens) // BUCKET) * BUCKET] * request.n
        assert len(needs) == scheduler.running and len(needs) * max(needs, default=0) <= places
        if not needs:
            break
        finished = data.draw(st.sets(st.integers(0, len(needs) - 1), min_size=1))
        sources, targets = scheduler.compact(finished)
        for source, target in zip(sources, targets, strict=True):
            needs[target] = needs[source]
        del needs[scheduler.running :]
    assert started == sent


def test_an_idle_engine_admits_whatever_fits():
    scheduler = Scheduler(max_running=4, max_queued=10, max_prefill_tokens=100)
    for i in range(3):
        scheduler.add(make(i, n=2))
    assert [r.id for r in scheduler.admit(NEW).requests] == ["0", "1"]
    scheduler.compact([0, 1])
    assert [r.id for r in scheduler.admit(NEW).requests] == ["2"]


def test_a_nearly_full_engine_gathers_freed_slots_before_it_prefills():
    scheduler = Scheduler(max_running=64, max_queued=10, max_prefill_tokens=1000)
    scheduler.add(make(0, n=64))
    scheduler.admit(NEW)
    for i in range(1, 5):
        scheduler.add(make(i))
    freed = []
    for _ in range(4):
        scheduler.compact([0])
        freed.append(len(scheduler.admit(NEW).requests))
    assert freed == [0, 0, 3, 0]


def test_a_prompt_longer_than_the_bound_is_computed_in_parts_before_later_ones_start():
    scheduler = Scheduler(max_running=4, max_queued=10, max_prefill_tokens=5)
    for length in (12, 2):
        scheduler.add(make(length, length=length))
    parts = []
    for _ in range(3):
        round_ = scheduler.admit(NEW)
        parts.append(round_.part and (round_.part.start, round_.part.stop))
    assert parts == [(0, 5), (5, 10), None]
    assert [r.id for r in round_.requests] == ["12", "2"] and round_.begun is not None and round_.begun.stop == 10


def test_fewer_prompt_tokens_are_computed_beside_running_samples_and_known_ones_do_not_count():
    class Half(NothingKnown):
        def num_known(self, request: Request) -> int:
            return len(request.prompt) // 2

    scheduler = Scheduler(max_running=9, max_queued=10, max_prefill_tokens=100, max_prefill_per_round=10)
    for name, length in enumerate((90, 8, 20, 22)):
        scheduler.add(make(name, length=length))
    rounds = [scheduler.admit(Half()) for _ in range(4)]
    assert [[r.id for r in round_.requests] for round_ in rounds] == [["0", "1", "2", "3"], [], [], []]
    for name, length in enumerate((8, 20, 22)):
        scheduler.add(make(name, length=length))
    rounds = [scheduler.admit(Half()) for _ in range(4)]
    assert [[r.id for r in round_.requests] for round_ in rounds] == [["0"], ["1"], [], ["2"]]
    assert rounds[2].part is not None and (rounds[2].part.known, rounds[2].part.start, rounds[2].part.stop) == (11, 11, 21)


def test_a_prompt_that_is_begun_is_forgotten_with_its_request():
    scheduler = Scheduler(max_running=4, max_queued=10, max_prefill_tokens=5)
    for i in range(2):
        scheduler.add(make(i, length=9))
    scheduler.admit(NEW)
    assert scheduler.begun is not None and scheduler.remove_request("1") and scheduler.begun is not None
    assert scheduler.remove_request("0") and scheduler.begun is None
    scheduler.add(make(2, length=9))
    assert scheduler.admit(NEW).part is not None
    scheduler.drop_waiting()
    assert scheduler.begun is None


def test_waiting_requests_can_be_removed_and_dropped():
    scheduler = Scheduler(max_running=4, max_queued=10, max_prefill_tokens=5)
    for i in range(3):
        scheduler.add(make(i))
    assert scheduler.remove_request("1") and not scheduler.remove_request("1")
    assert [r.id for r in scheduler.drop_waiting()] == ["0", "2"]
    assert scheduler.num_waiting == 0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_prefill_batches_hold_each_prompt_once_and_respect_the_budget(lengths, max_tokens):
    lengths = np.array(lengths)
    batches = plan_prefill(lengths, max_tokens=max_tokens)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * lengths[batch].max() <= max_tokens
        assert len(batch) * lengths[batch].max() - lengths[batch].sum() <= MOST_PADDING
