"""What an engine holds, under random loads and requests."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import BusyError
from offbeat.fleet.slots import Shelf, counted


@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 6))
def test_no_more_is_held_than_fits_and_nothing_in_use_makes_room(seed: int, capacity: int) -> None:
    chance, shelf = random.Random(seed), Shelf(capacity)
    used: Counter[str] = Counter()
    last_used: dict[str, int] = {}
    for turn in range(100):
        name = chance.choice("abcdefghij")
        if chance.random() < 0.3 and used:
            done = chance.choice(list(used))
            used[done] -= 1
            shelf.in_use[done] -= 1
            used = +used
            assert set(shelf.drained()) <= set("abcdefghij") - set(used)
        elif name in shelf.held:
            shelf.put(name)
            last_used[name] = turn
            if chance.random() < 0.5:
                shelf.in_use[name] += 1
                used[name] += 1
            if chance.random() < 0.2:
                shelf.leaving.add(name)
        else:
            before, idle = set(shelf.held), {held for held in shelf.held if not used[held]}
            try:
                with shelf.loading():
                    victims = shelf.make_room()
            except BusyError:
                assert len(before) == capacity and not idle
                continue
            assert set(victims) <= idle
            assert all(last_used[victim] < min((last_used[kept] for kept in idle - set(victims)), default=turn) for victim in victims)
            shelf.put(name)
            last_used[name] = turn
        assert len(shelf.held) <= capacity
        assert all(held in shelf.held for held in used)


def test_several_that_load_at_once_each_get_room() -> None:
    shelf = Shelf(3)
    for name in "abc":
        shelf.put(name)
    with shelf.loading(), shelf.loading():
        assert shelf.make_room() == ["a", "b"]
    with shelf.loading(), counted(shelf.in_use, "c"):
        assert shelf.make_room() == []
    shelf.put("d")
    shelf.put("e")
    with counted(shelf.in_use, "c"), counted(shelf.in_use, "d"), counted(shelf.in_use, "e"), shelf.loading(), \
            pytest.raises(BusyError, match="all of the 3 adapters that an engine holds are in use"):
        shelf.make_room()
    assert list(shelf.held) == ["c", "d", "e"]


def test_what_leaves_does_so_with_its_last_request() -> None:
    shelf = Shelf(3)
    shelf.put("old")
    shelf.leaving.add("old")
    with counted(shelf.in_use, "old"):
        with counted(shelf.in_use, "old"):
            assert shelf.drained() == []
        assert shelf.drained() == []
        assert shelf.names == {"old"}
    assert shelf.drained() == ["old"]
    assert shelf.drained() == [] and not shelf.names


def test_counting_leaves_nothing_behind() -> None:
    counter: Counter[str] = Counter()
    with pytest.raises(ZeroDivisionError), counted(counter, "a"):
        assert counter == {"a": 1}
        raise ZeroDivisionError
    assert not list(counter)
