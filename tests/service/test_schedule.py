"""The schedule keeps each model's order, joins what can be joined, and is fair: seen on random work, against what it promises."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.service.schedule import Job, Lane, Schedule, Turn

BUDGET = 100
KIND = st.tuples(st.integers(1, 9), st.integers(1, 4))
SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=12)
WORK = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 1), st.sampled_from(list(Lane)), SIZES, st.booleans()), min_size=1, max_size=60)


def job(model: str, lane: Lane, sizes: list[int] | None = None, *, owner: str = "", item: int = 0) -> Job[int]:
    is_pass = lane in (Lane.LEARN, Lane.SCORE)
    return Job(model, owner or model[0], lane, item, sizes=np.array(sizes, np.int64) if is_pass and sizes is not None else None)


def schedule(*jobs: Job[int]) -> Schedule[int]:
    made: Schedule[int] = Schedule(max_tokens=BUDGET)
    for one in jobs:
        made.add(one)
    return made


def drain(work: Schedule[int]) -> list[Turn[int]]:
    return list(iter(work.next, None))


def told(turn: Turn[int] | None) -> list[tuple[str, int, int]]:
    assert turn is not None
    return [(part.job.model, part.start, part.end) for part in turn.parts]


@settings(max_examples=200, deadline=None)
@given(WORK)
def test_every_sequence_is_given_out_once_and_each_models_jobs_run_in_order(work: list[tuple[int, int, Lane, list[int], bool]]) -> None:
    made, added, turns = schedule(), [], []
    for number, (owner, model, lane, sizes, take) in enumerate(work):
        added.append(job(f"{owner}-{model}", lane, sizes, item=number))
        made.add(added[-1])
        if take:
            turns.append(made.next())
    turns += drain(made)
    assert len(made) == 0 and made.next() is None
    parts = [(turn, part) for turn in turns for part in turn.parts]
    for one in added:
        own = [part for _, part in parts if part.job is one]
        assert [part.start for part in own] == [0, *(part.end for part in own[:-1])] and own[-1].is_last
        assert sum(part.size for part in own) == one.sizes.sum()
    for model in {one.model for one in added}:
        order = [part.job.item for _, part in parts if part.job.model == model]
        assert order == sorted(order)
    for turn in turns:
        assert {part.job.lane for part in turn.parts} == {turn.lane}
        if turn.lane in (Lane.STEP, Lane.ALONE):
            assert max(Counter(part.job.model for part in turn.parts).values()) == 1
        if turn.lane in (Lane.LEARN, Lane.SCORE) and sum(part.end - part.start for part in turn.parts) > 1:
            assert sum(part.size for part in turn.parts) <= BUDGET
    assert all(len(turn.parts) <= 4 for turn in turns if turn.lane is Lane.ALONE)


@settings(max_examples=50, deadline=None)
@given(st.lists(KIND, min_size=2, max_size=6), st.integers(5, 80), st.booleans(), st.integers(0, 999))
def test_owners_who_always_have_work_get_equally_much(kinds: list[tuple[int, int]], size: int, is_mixed: bool, seed: int) -> None:
    """However many models one has. With longer jobs or sequences than others, one may lose the holes that only theirs fill."""
    is_even = not is_mixed and len({count for count, _ in kinds}) == 1
    rng, made, had, added = np.random.default_rng(seed), schedule(), [0] * len(kinds), [0] * len(kinds)
    for _ in range(30):
        for owner, (count, num_models) in enumerate(kinds):
            longest = size // (owner + 1) + 1 if is_mixed else size
            while added[owner] < had[owner] + 2 * BUDGET:
                model = f"{owner}-{rng.integers(num_models)}"
                made.add(work := job(model, Lane.LEARN, rng.integers(longest // 2 + 1, longest + 2, count).tolist()))
                added[owner] += work.left
        turn = made.next()
        assert turn is not None
        for part in turn.parts:
            had[int(part.job.owner)] += part.size
        if is_even:
            assert max(had) - min(had) <= 2 * BUDGET
        else:
            assert min(had) >= sum(had) / len(had) / 2 - 2 * BUDGET


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_a_newcomer_waits_no_longer_than_for_one_round_of_the_others(num_others: int, seed: int) -> None:
    rng, made = np.random.default_rng(seed), schedule()
    lanes = list(Lane)

    def refill() -> None:
        for owner in range(num_others):
            for model in range(2):
                while sum(waiting.model == f"{owner}-{model}" for waiting in made) < 3:
                    lane = lanes[rng.integers(0, len(lanes))]
                    made.add(job(f"{owner}-{model}", lane, rng.integers(1, 150, rng.integers(1, 8)).tolist(), owner=str(owner)))

    for _ in range(int(rng.integers(0, 40))):
        refill()
        made.next()
    for lane in lanes:
        late = job("late", lane, [5], owner="late")
        made.add(late)
        for _ in range(4 * (num_others + 1)):
            refill()
            made.next()
        assert late.done == 1


def test_what_is_had_in_one_lane_counts_in_all() -> None:
    """An owner who saves all the time gets, beside nine who train, no more than they do; lanes that took turns gave him half."""
    made, had = schedule(), Counter[str]()
    for _ in range(200):
        while sum(waiting.owner == "saver" for waiting in made) < 4:
            made.add(Job("saver", "saver", Lane.ALONE, 0, sizes=np.array([25])))
        for owner in "abcdefghi":
            while sum(waiting.owner == owner for waiting in made) < 2:
                made.add(job(owner, Lane.LEARN, [10, 10]))
        turn = made.next()
        assert turn is not None
        had.update({part.job.owner: 0 for part in turn.parts})
        for part in turn.parts:
            had[part.job.owner] += part.size
    assert max(had.values()) - min(had.values()) <= 3 * BUDGET, had


def test_what_is_alone_shares_a_turn_by_its_size() -> None:
    made = schedule(*(Job(model, model, Lane.ALONE, 0, sizes=np.array([40])) for model in "abcde"))
    assert [len(turn.parts) for turn in drain(made)] == [2, 2, 1]
    assert [len(turn.parts) for turn in drain(schedule(Job("a", "a", Lane.ALONE, 0, sizes=np.array([400]))))] == [1]


def test_a_turn_needs_no_more_models_than_there_is_room_for() -> None:
    made: Schedule[int] = Schedule(max_tokens=BUDGET, max_models=3)
    for model in "abcdefgh":
        for lane in (Lane.LEARN, Lane.STEP):
            made.add(job(model, lane, [5]))
    turns = drain(made)
    assert max(len(turn.parts) for turn in turns) == 3 and sum(len(turn.parts) for turn in turns) == 16


def test_passes_of_all_models_and_steps_of_all_models_are_one_turn_each() -> None:
    made = schedule(*(work for name in "abcd" for work in (
        job(name, Lane.LEARN, [10, 10]), job(name, Lane.LEARN, [4]), job(name, Lane.STEP), job(name, Lane.SCORE, [1]))))
    learn, step, score = drain(made)
    assert learn.lane is Lane.LEARN and sum(part.size for part in learn.parts) == 4 * 24
    assert step.lane is Lane.STEP and len(step.parts) == 4
    assert score.lane is Lane.SCORE and len(score.parts) == 4


def test_a_job_larger_than_the_budget_is_cut_and_lets_others_in_between() -> None:
    made = schedule(job("a", Lane.LEARN, [40] * 6), job("b", Lane.LEARN, [30, 30]))
    assert told(made.next()) == [("a", 0, 2)]
    assert told(made.next()) == [("b", 0, 2)]
    assert told(made.next()) == [("a", 2, 4)]
    made.add(job("c", Lane.LEARN, [20]))
    assert told(made.next()) == [("c", 0, 1), ("a", 4, 6)]


def test_a_sequence_larger_than_the_budget_and_a_pass_of_none_go_through() -> None:
    assert [told(turn) for turn in drain(schedule(job("a", Lane.SCORE, [500, 1]), job("b", Lane.SCORE, [])))] == [
        [("a", 0, 1)], [("b", 0, 0), ("a", 1, 2)]]


def test_nothing_more_is_given_out_of_a_job_that_is_dropped() -> None:
    large, after = job("a", Lane.LEARN, [80, 80]), job("a", Lane.STEP)
    made = schedule(large, after)
    assert told(made.next()) == [("a", 0, 1)]
    made.drop(large)
    made.drop(large)
    turn = made.next()
    assert turn is not None and turn.parts[0].job is after
    assert made.next() is None
