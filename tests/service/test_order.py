"""Order of numbered items: against a slow definition, over random arrivals."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.service.order import Numbers, Sequencer

PATIENCE_S = 5.0


def test_items_that_come_in_order_are_ready_at_once() -> None:
    order = Sequencer[str](PATIENCE_S)
    order.offer(1, "a", 0.0)
    assert order.ready(0.0) == ["a"]
    order.offer(2, "b", 0.0)
    order.offer(3, "c", 0.0)
    assert order.ready(0.0) == ["b", "c"]
    assert order.next_due is None
    assert order.next_seq == 4


def test_an_item_waits_for_the_one_before_it() -> None:
    order = Sequencer[str](PATIENCE_S)
    order.offer(2, "b", 0.0)
    assert order.ready(4.9) == []
    order.offer(1, "a", 4.9)
    assert order.ready(4.9) == ["a", "b"]


def test_a_gap_is_given_up_when_the_patience_ends_and_what_comes_late_runs_at_once() -> None:
    order = Sequencer[str](PATIENCE_S)
    order.offer(3, "c", 1.0)
    order.offer(4, "d", 2.0)
    assert order.ready(2.0) == []
    assert order.next_due == 6.0
    assert order.ready(6.0) == ["c", "d"]
    order.offer(2, "b", 7.0)
    order.offer(1, "a", 7.0)
    order.offer(6, "f", 7.0)
    assert order.ready(7.0) == ["a", "b"]


def test_nothing_waits_for_a_number_that_was_skipped() -> None:
    order = Sequencer[str](PATIENCE_S)
    order.offer(3, "c", 0.0)
    order.skip(2, 0.0)
    assert order.ready(0.0) == []
    order.skip(1, 1.0)
    assert order.ready(1.0) == ["c"]
    assert order.next_seq == 4


def test_skipping_a_number_that_came_keeps_its_item() -> None:
    order = Sequencer[str](PATIENCE_S)
    order.offer(2, "b", 0.0)
    order.skip(2, 0.0)
    order.offer(1, "a", 0.0)
    assert order.ready(0.0) == ["a", "b"]


def test_an_order_goes_on_where_an_earlier_one_ended() -> None:
    order = Sequencer[str](PATIENCE_S, next_seq=8)
    order.offer(9, "i", 0.0)
    order.offer(8, "h", 0.0)
    assert order.ready(0.0) == ["h", "i"]


def test_items_wait_for_one_that_is_certain_to_come_however_long_it_takes() -> None:
    order = Sequencer[str](PATIENCE_S)
    order.expect(2)
    order.offer(3, "c", 0.0)
    assert order.ready(0.0) == [] and order.is_waiting and order.next_due is None
    order.offer(4, "d", 50.0)
    assert order.ready(100.0) == []
    order.skip(1, 100.0)
    order.offer(2, "b", 100.0)
    assert order.ready(100.0) == ["b", "c", "d"]
    order.unexpect(2, 100.0)
    assert not order.is_waiting


def test_items_before_one_that_is_certain_to_come_do_not_wait_for_it() -> None:
    order = Sequencer[str](PATIENCE_S)
    order.expect(3)
    order.offer(2, "b", 0.0)
    order.offer(4, "d", 0.0)
    assert order.ready(0.0) == [] and order.next_due == PATIENCE_S
    assert order.ready(PATIENCE_S) == ["b"] and order.next_due is None
    order.offer(3, "c", 9.0)
    assert order.ready(9.0) == ["c", "d"]


def test_one_that_does_not_come_after_all_is_a_gap_like_others() -> None:
    order = Sequencer[str](PATIENCE_S)
    order.expect(1)
    order.expect(1)  # sent again while it was on its way
    order.offer(2, "b", 0.0)
    order.unexpect(1, 8.0)
    assert order.ready(99.0) == []
    order.unexpect(1, 99.0)
    assert order.ready(99.0) == [] and order.next_due == 99.0 + PATIENCE_S, "it may be sent again within the patience"
    assert order.ready(99.0 + PATIENCE_S) == ["b"]
    order.expect(1)  # one that comes late holds nothing up
    order.offer(4, "d", 110.0)
    assert order.ready(110.0 + PATIENCE_S) == ["d"]


def test_skips_that_nothing_follows_are_not_kept() -> None:
    order = Sequencer[str](PATIENCE_S)
    for seq in range(10, 1000, 2):
        order.skip(seq, 0.0)
    assert order.ready(PATIENCE_S) == []
    assert order.next_due is None


arrivals = st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.floats(0, 4)), max_size=12, unique_by=lambda arrival: arrival[0])


def may_run(seq: int, now: float, came: dict[int, float]) -> bool:
    """By definition: each number before it came, or something behind that number has waited its patience out."""
    return all(
        before in came or any(later > before and due + PATIENCE_S <= now for later, due in came.items()) for before in range(1, seq))


@given(arrivals)
def test_each_item_is_given_once_in_order_and_exactly_when_it_may_run(arrivals: list[tuple[int, bool, float]]) -> None:
    order = Sequencer[int](PATIENCE_S)
    now = 0.0
    came: dict[int, float] = {}  # skipped numbers too
    items: set[int] = set()
    given_out: list[int] = []

    def poll() -> None:
        ready = order.ready(now)
        assert ready == sorted(ready)
        given_out.extend(ready)
        assert set(given_out) == {seq for seq in items if may_run(seq, now, came)}

    for seq, skipped, wait_s in arrivals:
        while order.next_due is not None and order.next_due <= now + wait_s:
            wait_s -= order.next_due - now
            now = order.next_due
            poll()
        now += max(wait_s, 0.0)
        came[seq] = now
        if skipped:
            order.skip(seq, now)
        else:
            order.offer(seq, seq, now)
            items.add(seq)
        poll()
    while order.next_due is not None:
        assert order.next_due > now
        now = order.next_due
        poll()
    assert sorted(given_out) == sorted(items)
    assert all(now <= came[seq] + PATIENCE_S for seq in items - set(given_out))


@given(st.lists(st.integers(1, 40), unique=True))
def test_a_number_is_used_once_it_was_used_and_one_that_comes_late_is_not(numbers: list[int]) -> None:
    used = Numbers(5)
    for place, number in enumerate(numbers):
        assert (number in used) == (number <= 5)
        used.use(number)
        assert [n for n in range(1, 50) if n in used] == sorted({1, 2, 3, 4, 5, *numbers[: place + 1]})
    assert used.last == max([5, *numbers])


def test_numbers_that_jump_cost_little_and_what_was_left_out_long_ago_counts_as_used() -> None:
    used = Numbers(0)
    for number in range(10**18, 10**18 + 10**9, 10**7):
        used.use(number)
    assert len(used._missing) <= 4000
    assert 1 in used and number - 1 not in used and number in used and number + 1 not in used
