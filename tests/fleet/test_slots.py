"""What an engine holds, under random loads and requests."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import BusyError
from offbeat.fleet.slots import AdapterSlots, counted


@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 6))
def test_no_more_is_held_than_fits_and_nothing_in_use_makes_room(seed: int, capacity: int) -> None:
    chance, slots = random.Random(seed), AdapterSlots(capacity)
    used: Counter[str] = Counter()
    last_used: dict[str, int] = {}
    for turn in range(100):
        name = chance.choice("abcdefghij")
        if chance.random() < 0.3 and used:
            done = chance.choice(list(used))
            used[done] -= 1
            slots.in_use[done] -= 1
            used = +used
            assert set(slots.drained()) <= set("abcdefghij") - set(used)
        elif name in slots.held:
            slots.put(name)
            last_used[name] = turn
            if chance.random() < 0.5:
                slots.in_use[name] += 1
                used[name] += 1
            if chance.random() < 0.2:
                slots.leaving.add(name)
        else:
            before, idle = set(slots.held), {held for held in slots.held if not used[held]}
            try:
                with slots.loading():
                    victims = slots.make_room()
            except BusyError:
                assert len(before) == capacity and not idle
                continue
            assert set(victims) <= idle
            assert all(last_used[victim] < min((last_used[kept] for kept in idle - set(victims)), default=turn) for victim in victims)
            slots.put(name)
            last_used[name] = turn
        assert len(slots.held) <= capacity
        assert all(held in slots.held for held in used)


def test_several_that_load_at_once_each_get_room() -> None:
    slots = AdapterSlots(3)
    for name in "abc":
        slots.put(name)
    with slots.loading(), slots.loading():
        assert slots.make_room() == ["a", "b"]
    with slots.loading(), counted(slots.in_use, "c"):
        assert slots.make_room() == []
    slots.put("d")
    slots.put("e")
    with counted(slots.in_use, "c"), counted(slots.in_use, "d"), counted(slots.in_use, "e"), slots.loading(), \
            pytest.raises(BusyError, match="all of the 3 adapters that an engine holds are in use"):
        slots.make_room()
    assert list(slots.held) == ["c", "d", "e"]


def test_what_leaves_does_so_with_its_last_request() -> None:
    slots = AdapterSlots(3)
    slots.put("old")
    slots.leaving.add("old")
    with counted(slots.in_use, "old"):
        with counted(slots.in_use, "old"):
            assert slots.drained() == []
        assert slots.drained() == []
        assert slots.names == {"old"}
    assert slots.drained() == ["old"]
    assert slots.drained() == [] and not slots.names


def test_counting_leaves_nothing_behind() -> None:
    counter: Counter[str] = Counter()
    with pytest.raises(ZeroDivisionError), counted(counter, "a"):
        assert counter == {"a": 1}
        raise ZeroDivisionError
    assert not list(counter)
