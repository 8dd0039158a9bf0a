"""One group and the user's code: what a workflow or a filter does wrong fails this group alone, with the reason."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from offbeat.config.rollout import RolloutConfig
from offbeat.data.row import Row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.trajectory import Group, Trajectory
from offbeat.errors import EngineError, TooLongError
from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.accounts import Accounts
from offbeat.rollout.episode import Episode
from offbeat.rollout.idle import IdleMeter, NoListener, WaitingMinute
from offbeat.rollout.outcomes import GroupFailure, RolloutListener
from offbeat.rollout.player import GroupPlayer, RolloutParts
from offbeat.rollout.staleness import Gate
from offbeat.rollout.workflows.single_turn import single_turn

TOKENIZER = character_tokenizer()
TOKENS = np.array([5, 6])
GROUP = Group("0:0", 3, (Trajectory(TOKENS, TOKENS > 5, TOKENS * 0.0, TOKENS * 0, 1.0),) * 2)


async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
    return [Sample((5, 0), (-0.5, -0.5), (3, 3), "1", "stop")] * n


async def score(completions: Sequence[str], row: Row) -> list[float]:
    return [1.0] * len(completions)


def episode(row: Row, group_size: int, sampling: Sampling) -> Episode:
    return Episode(row, tuple(TOKENIZER.encode(str(row.prompt))), group_size, sampling, generate, score, TOKENIZER)


def gate() -> Gate:
    return Gate(batch_size=1, max_running=1, eta=0, version=0)


def player(
    workflow: Callable[[Episode], Awaitable[Sequence[Trajectory]]] = single_turn, *,
    make_episode: Callable[[Row, int, Sampling], Episode] = episode, accept: Callable[[Group], bool] = lambda _group: True,
    idle: IdleMeter | None = None,
) -> GroupPlayer:
    config = RolloutConfig(workflow="mine.py:mine", episode_timeout_s=60, reward_timeout_s=1)
    idle = idle or IdleMeter(gate(), NoListener())
    parts = RolloutParts(workflow=workflow, make_episode=make_episode, accept=accept)
    return GroupPlayer(parts, config=config, idle=idle, listener=RolloutListener())


def played(of: GroupPlayer) -> tuple[Group, GroupFailure | None]:
    return asyncio.run(of.play("0:0", Row("1>", "1"), 2, Sampling(8), version=3, accounts=Accounts()))


def test_a_group_is_what_its_workflow_returns_and_keeps_the_version_at_which_it_began() -> None:
    group, failure = played(player())
    assert failure is None and (group.prompt_id, group.admitted_version) == ("0:0", 3)
    assert group.rewards.tolist() == [1.0, 1.0] and [t.tokens.tolist()[-2:] for t in group.trajectories] == [[5, 0], [5, 0]]


def test_the_hint_that_engines_idle_hears_of_rewards_that_are_waited_for() -> None:
    now, told = [0.0], list[WaitingMinute]()

    async def slow(completions: Sequence[str], row: Row) -> list[float]:
        now[0] += 100
        return [1.0] * len(completions)

    def scored_slowly(row: Row, group_size: int, sampling: Sampling) -> Episode:
        return replace(episode(row, group_size, sampling), score=slow)

    class Listener:
        def report_minute(self, minute: WaitingMinute) -> None:
            told.append(minute)

    full = gate()
    full.admit("0:0")
    idle = IdleMeter(full, Listener(), now_s=lambda: now[0])
    idle.look()
    played(player(make_episode=scored_slowly, idle=idle))
    assert len(told) == 1 and told[0].mostly_rewards and told[0].idle_share == 1


def test_what_a_workflow_raises_is_the_reason_of_its_group() -> None:
    async def in_a_task_group(episode: Episode) -> Sequence[Trajectory]:
        async def fail() -> None:
            raise EngineError("engine 0 died")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
        return ()

    async def lets_a_cancellation_escape(episode: Episode) -> Sequence[Trajectory]:
        raise asyncio.CancelledError("mine")

    def awaits_nothing(episode: Episode) -> list[Trajectory]:
        return []

    for workflow, kind, ours, reason in (
        (in_a_task_group, "engine failed", True, "engine 0 died"),
        (lets_a_cancellation_escape, "code failed", False, "the workflow mine.py:mine let a cancellation of its own escape"),
        (awaits_nothing, "code failed", False, "the workflow mine.py:mine must be an async function, but calling it gave []"),
    ):
        group, failure = played(player(workflow))  # type: ignore[arg-type]
        assert failure is not None and (failure.kind, failure.is_ours, failure.again) == (kind, ours, True)
        assert reason in str(group.rejected) and not group.trajectories


def test_what_user_code_raises_is_told_with_its_line_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def raises(episode: Episode) -> Sequence[Trajectory]:
        raise KeyError("turns")

    def refuses(group: Group) -> bool:
        raise ValueError("no score")

    plays = player(raises, accept=refuses)
    line = raises.__code__.co_firstlineno + 1
    for _ in range(3):
        group, _ = played(plays)
        assert str(group.rejected).startswith("KeyError: 'turns' at ") and str(group.rejected).endswith(f"test_player.py, line {line}")
        failed, _, _ = plays.ask_filter(GROUP)
        assert str(failed.rejected).endswith(f"test_player.py, line {line + 3}")
    workflow, accept = (record.getMessage() for record in caplog.records)
    assert workflow.startswith("the workflow mine.py:mine raised\nTraceback") and f'test_player.py", line {line}, in raises' in workflow
    assert accept.startswith("should_accept raised\nTraceback") and "ValueError: no score" in accept


def test_a_prompt_of_which_no_episode_can_be_made_is_not_tried_again() -> None:
    def refuse(row: Row, group_size: int, sampling: Sampling) -> Episode:
        raise TooLongError("prompt 0:0 has 9 tokens")

    group, failure = played(player(make_episode=refuse))
    assert failure is not None and (failure.kind, failure.again) == ("too long", False)
    assert str(group.rejected).endswith("prompt 0:0 has 9 tokens")


def test_a_cancellation_from_outside_ends_the_group() -> None:
    async def waits(episode: Episode) -> Sequence[Trajectory]:
        await asyncio.Event().wait()
        return ()

    async def body() -> None:
        task = asyncio.create_task(player(waits).play("0:0", Row("1>", "1"), 2, Sampling(8), version=3, accounts=Accounts()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())


def test_a_filter_accepts_refuses_or_fails_a_group() -> None:
    def exits(_group: Group) -> bool:
        raise SystemExit(3)

    assert player().ask_filter(GROUP) == (GROUP, None, None)
    refused, failure, kind = player(accept=lambda _group: False).ask_filter(GROUP)
    assert (refused.rejected, refused.trajectories, failure, kind) == ("not accepted by should_accept", (), None, "not accepted")
    for accept, reason in (
        (lambda _group: None, "should_accept must return True or False, got None"), (exits, "should_accept raised SystemExit: 3"),
    ):
        failed, failure, kind = player(accept=accept).ask_filter(GROUP)  # type: ignore[arg-type]
        assert failure is not None and failure.kind == "code failed" and kind is None
        assert str(failed.rejected).startswith(reason) and not failed.trajectories
