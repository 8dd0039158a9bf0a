"""The hint that episodes wait and engines idle, on a clock of the test's own."""

from contextlib import ExitStack

import pytest

from offbeat.config.agent import AgentConfig
from offbeat.config.rollout import RolloutConfig
from offbeat.rollout.idle import IdleHint, Limit, limit_of_places, limit_of_running, limit_of_staleness, waits_besides

RUNNING = limit_of_running(RolloutConfig(max_concurrent_rollouts=4, consumer_batch_size=8))
PLACES = limit_of_places(AgentConfig(processes=2, episodes_per_process=16))


def played(*, idle_s: float, busy_s: float, running: int = 4, limit: Limit | None = RUNNING, queued: int = 0) -> list[str]:
    """What is told after two minutes of calls that take `busy_s` and are `idle_s` apart."""
    told: list[str] = []
    now = [0.0]
    hint = IdleHint(
        told.append, num_running=lambda: running, limit=lambda: limit, places=PLACES, now_s=lambda: now[0])
    with ExitStack() as waiting:
        for _ in range(queued):
            waiting.enter_context(hint.queueing())
        while now[0] < 120:
            now[0] += idle_s
            with hint.calling():
                now[0] += busy_s
    return told


def test_it_is_told_once_with_the_setting_the_factor_and_what_to_set() -> None:
    [told] = played(idle_s=1.5, busy_s=0.5)
    assert told == (
        "engines had nothing to do for 75% of the last minute in which groups ran, as all groups waited for their environments;"
        " rollout.max_concurrent_rollouts = 4 keeps out more, and 4.0 times as many groups would keep the engines busy; set"
        " rollout.max_concurrent_rollouts = 16")
    [told] = played(idle_s=9, busy_s=0.1)
    assert told.endswith(
        "and 20 times or more as many groups would keep the engines busy; set rollout.max_concurrent_rollouts = 80; above 16,"
        " rollout.max_head_offpolicyness or rollout.consumer_batch_size has to grow, too")


@pytest.mark.parametrize("limit", [RUNNING, None])
def test_episodes_that_wait_for_a_place_are_held_up_by_the_places_whatever_else_there_is(limit: Limit | None) -> None:
    [told] = played(idle_s=1.5, busy_s=0.5, limit=limit, queued=3)
    assert told == (
        "engines had nothing to do for 75% of the last minute in which groups ran, as all episodes that have a place waited for their"
        " environments;"
        " agent.processes = 2 times agent.episodes_per_process = 16 are all the places there are, others wait for one, and 4.0 times as"
        " many places would keep the engines busy; set agent.episodes_per_process = 64, or as many times as many agent.processes if your"
        " code computes rather than waits")


def scored(*, num_at_once: int, reward_s: float = 3.0, besides_s: float = 0.0, besides: str = "", reward_workers: int = 2) -> list[str]:
    """What a run is told that generates for a second, then asks for so many rewards at the same time, and then does something else."""
    told: list[str] = []
    now = [0.0]
    staleness = limit_of_staleness(RolloutConfig(max_head_offpolicyness=1))
    hint = IdleHint(
        told.append, num_running=lambda: 4, limit=lambda: staleness, besides=besides, reward_workers=reward_workers, now_s=lambda: now[0])
    while now[0] < 120:
        with hint.calling():
            now[0] += 1
        with ExitStack() as scoring:
            for _ in range(num_at_once):
                scoring.enter_context(hint.scoring())
            now[0] += reward_s
        now[0] += besides_s
    return told


def test_groups_that_wait_for_their_rewards_are_not_said_to_wait_for_environments() -> None:
    assert scored(num_at_once=2) == [
        "engines had nothing to do for 75% of the last minute in which groups ran, as all groups waited for their rewards; make the reward"
        " faster; or else, rollout.max_head_offpolicyness = 1 keeps out more, and 4.0 times as many groups would keep the engines busy"]
    assert scored(num_at_once=6) == [
        "engines had nothing to do for 75% of the last minute in which groups ran, as all groups waited for their rewards, which 6 of them"
        " on average asked for at the same time; make the reward faster, or raise rollout.reward_workers = 2"]


def test_what_took_longer_is_named_of_rewards_and_what_a_workflow_does_besides() -> None:
    [told] = scored(num_at_once=1, reward_s=1, besides_s=2, besides=waits_besides("gym"))
    assert "waited for their environments; rollout.max_head_offpolicyness" in told
    [told] = scored(num_at_once=1, reward_s=2, besides_s=1, besides=waits_besides("gym"))
    assert "waited for their rewards; " in told


@pytest.mark.parametrize(("workflow", "besides"), [
    ("tool_loop", "their tools"), ("agent", "their tools and environments"), ("mine.py:play", "what mine.py:play does besides"),
    ("single_turn", ""),
])
def test_each_workflow_waits_for_something_of_its_own(workflow: str, besides: str) -> None:
    assert waits_besides(workflow) == besides
    told = scored(num_at_once=0, besides=besides)
    assert len(told) == bool(besides) and all(f"waited for {besides};" in each for each in told), "one turn waits for rewards alone"


def test_how_far_groups_run_ahead_is_named_and_nothing_advised() -> None:
    [told] = played(idle_s=1.5, busy_s=0.5, limit=limit_of_staleness(RolloutConfig(max_head_offpolicyness=1)))
    assert "rollout.max_head_offpolicyness = 1 keeps out more" in told and told.endswith("would keep the engines busy")


@pytest.mark.parametrize("options", [{"busy_s": 5.0}, {"running": 0}, {"limit": None}])
def test_busy_engines_and_places_that_are_free_are_no_reason(options) -> None:
    assert played(**{"idle_s": 1.5, "busy_s": 0.5} | options) == []


def test_time_in_which_no_group_ran_is_the_trainers() -> None:
    told: list[str] = []
    now, running = [0.0], [0]
    hint = IdleHint(told.append, num_running=lambda: running[0], limit=lambda: RUNNING, now_s=lambda: now[0])
    for _ in range(20):  # synchronous training: four seconds of generation, eight of training
        running[0] = 4
        hint.look()
        with hint.calling():
            now[0] += 4
        running[0] = 0
        hint.look()
        now[0] += 8
    assert told == []


def test_calls_at_the_same_time_count_once() -> None:
    told: list[str] = []
    now = [0.0]
    hint = IdleHint(told.append, num_running=lambda: 1, limit=lambda: RUNNING, now_s=lambda: now[0])
    with hint.calling():
        for _ in range(100):
            now[0] += 1
            with hint.calling():
                now[0] += 1
    assert told == []
