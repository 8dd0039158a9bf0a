"""Which engine is chosen: under random loads, and over whole simulated runs."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from offbeat.fleet.routing import YIELD_FACTOR, YIELD_REQUESTS, Router

LOADS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3) | st.integers(0, 10_000), min_size=1)


@given(st.lists(st.tuples(LOADS, st.integers(1, 100), st.sampled_from(["", "s", "t"])), max_size=20))
def test_the_least_busy_engine_is_chosen_unless_the_session_has_one_that_is_not_much_busier(questions) -> None:
    router, homes = Router(), {}
    for loads, cost, session in questions:
        chosen, least = router.choose(loads, cost=cost, session=session), min(loads.values())
        home = homes.get(session)
        if session and home in loads and loads[home] <= YIELD_FACTOR * least + YIELD_REQUESTS * cost:
            assert chosen == home
        else:
            assert loads[chosen] == least
        if session:
            homes[session] = chosen


@given(seed=st.integers(0, 2**32), num_engines=st.integers(1, 6), num_sessions=st.integers(0, 8))
def test_no_engine_gets_far_ahead_of_the_others(seed: int, num_engines: int, num_sessions: int) -> None:
    """Sessions may crowd on one engine, but only up to the bound at which they yield."""
    chance, router, cost = random.Random(seed), Router(), 10
    loads, running = dict.fromkeys(map(str, range(num_engines)), 0), []
    for _ in range(200):
        if running and chance.random() < 0.4:
            loads[running.pop(chance.randrange(len(running)))] -= cost
        else:
            session = str(chance.randrange(num_sessions)) if num_sessions else ""
            least = min(loads.values())
            engine = router.choose(loads, cost=cost, session=session)
            loads[engine] += cost
            running.append(engine)
            assert loads[engine] <= YIELD_FACTOR * least + (YIELD_REQUESTS + 1) * cost


def test_idle_engines_take_turns() -> None:
    router = Router()
    counts = Counter(router.choose({"a": 0, "b": 0, "c": 0}, cost=1) for _ in range(300))
    assert set(counts.values()) == {100}


@given(st.lists(LOADS, max_size=30))
def test_of_equally_busy_engines_the_one_is_chosen_whose_last_turn_is_longest_ago(questions) -> None:
    router, last_turns = Router(), {}
    for turn, loads in enumerate(questions, start=1):
        able = [name for name, load in loads.items() if load == min(loads.values())]
        chosen = router.choose(loads, cost=1)
        assert chosen in able and last_turns.get(chosen, 0) == min(last_turns.get(name, 0) for name in able)
        last_turns[chosen] = turn


def test_an_engine_that_is_new_takes_turns_like_the_others() -> None:
    router = Router()
    for _ in range(100):
        router.choose({"a": 0, "b": 0}, cost=1)
    counts = Counter(router.choose({"a": 0, "b": 0, "c": 0}, cost=1) for _ in range(30))
    assert set(counts.values()) == {10}


def test_only_the_latest_sessions_are_remembered() -> None:
    router = Router(max_sessions=2)
    homes = {session: router.choose({"a": 0, "b": 0, "c": 0}, cost=1, session=session) for session in "xyz"}
    assert sorted(homes.values()) == ["a", "b", "c"]
    loads = {engine: int(engine != "a") for engine in "abc"}  # `a` was x's home, and it is the least busy by a little
    assert router.choose(loads, cost=1, session="z") == homes["z"] == "c"
    assert router.choose(loads, cost=1, session="x") == "a"
    assert router.choose(loads, cost=1, session="y") == "a"  # forgotten
