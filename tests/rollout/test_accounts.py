"""Where the time of episodes goes, on a clock of the test's own."""

import time
from itertools import pairwise

import pytest

from offbeat.rollout.accounts import MOST_TRACED, NUM_TRACKS, Account, Accounts
from offbeat.telemetry.tracker import combine


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def play(clock: Clock, account: Account, *, queue_s: float = 1.0, turns: int = 2) -> None:
    """Wait for a place, then let calls of 2 s and tools of 3 s alternate, and last a reward of 4 s."""
    with account:
        with account.doing("queue"):
            clock.wait(queue_s)
        for _ in range(turns):
            with account.doing("model"):
                clock.wait(2)
            clock.wait(3)
        with account.doing("reward"):
            clock.wait(4)


def test_an_episode_is_divided_by_what_it_waits_for() -> None:
    clock = Clock()
    accounts = Accounts(now_s=clock)
    play(clock, accounts.open("0:1", 0))
    play(clock, accounts.open("0:1", 1), queue_s=3.0, turns=1)
    assert accounts.take_stats().values() == pytest.approx({
        "rollout/episode_mean_s": (11 + 8) / 2, "rollout/episode_max_s": 11, "rollout/model_share": 6 / 19,
        "rollout/tool_share": 9 / 19, "rollout/queue_share": 4 / 19})
    assert accounts.take_stats().values() == {}


def test_calls_at_the_same_time_count_once() -> None:
    clock = Clock()
    account = Account(now_s=clock, most_stretches=10)
    with account:
        with account.doing("model"):
            clock.wait(1)
            with account.doing("model"), account.doing("reward"):
                clock.wait(2)
            clock.wait(3)
        clock.wait(4)
    assert account.seconds == {"tool": 4.0, "model": 6.0} and account.num_calls == 2
    assert [(each.doing, each.end_s - each.start_s) for each in account.stretches] == [("model", 6.0), ("tool", 4.0)]


def test_a_cancelled_episode_counts_nowhere_and_gives_back_its_track() -> None:
    clock, spans = Clock(), []
    accounts = Accounts(lambda *span: spans.append(span), now_s=clock)
    for _ in range(NUM_TRACKS + 1):
        with pytest.raises(KeyboardInterrupt), accounts.open("0:1", 0):
            raise KeyboardInterrupt
    assert accounts.take_stats().values() == {} and not spans
    play(clock, accounts.open("0:2", 0))
    assert len(spans) == 6


def test_the_turns_of_the_first_episode_of_a_group_are_drawn_in_wall_clock_time() -> None:
    clock, spans = Clock(), []
    accounts = Accounts(lambda *span: spans.append(span), now_s=clock)
    begun_s = time.time()
    for index in range(3):
        play(clock, accounts.open("0:7", index))
    assert [(name, args["call"]) for name, _, _, _, args in spans] == [
        ("queue", 0), ("model", 1), ("tool", 1), ("model", 2), ("tool", 2), ("reward", 2)]
    assert {track for _, track, *_ in spans} == {"episodes 0"} and {args["prompt"] for *_, args in spans} == {"0:7"}
    assert all(before[3] == pytest.approx(after[2]) for before, after in pairwise(spans))
    assert spans[0][2] == pytest.approx(begun_s, abs=5) and spans[-1][3] - spans[0][2] == pytest.approx(15)
    play(clock, accounts.open("0:8", 0), turns=1)
    assert len(spans) == 6, "a single turn shows nothing"


def test_what_is_drawn_of_a_step_is_bounded() -> None:
    clock, spans = Clock(), []
    accounts = Accounts(lambda *span: spans.append(span), now_s=clock)
    for step in (1, 2):
        for prompt in range(3 * MOST_TRACED):
            play(clock, accounts.open(f"0:{prompt}", 0))
        assert len({args["prompt"] for *_, args in spans}) == MOST_TRACED and len(spans) == 6 * MOST_TRACED * step
        accounts.take_stats()
    together = [accounts.open(f"1:{prompt}", 0).__enter__() for prompt in range(20)]
    assert sum(account.most_stretches > 0 for account in together) == NUM_TRACKS, "only so many at the same time"


def test_what_is_kept_of_a_long_episode_is_bounded_and_its_sums_are_not() -> None:
    clock, spans = Clock(), []
    accounts = Accounts(lambda *span: spans.append(span), now_s=clock)
    play(clock, accounts.open("0:1", 0), turns=1000)
    assert len(spans) < 1000 and accounts.take_stats().values()["rollout/episode_max_s"] == 5001


def test_the_accounts_of_several_processes_add_up() -> None:
    clock = Clock()
    one, other, none = (Accounts(now_s=clock) for _ in range(3))
    play(clock, one.open("0:1", 0))
    play(clock, other.open("0:2", 0), queue_s=3.0, turns=1)
    metrics = combine([one.take_stats(), other.take_stats(), none.take_stats()]).values()
    assert metrics["rollout/episode_mean_s"] == 9.5 and metrics["rollout/model_share"] == pytest.approx(6 / 19)
