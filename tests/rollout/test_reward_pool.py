"""Rewards in real processes: what they answer, and what happens when they misbehave."""

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from offbeat.data.reward import FailedReward, NamedReward
from offbeat.data.row import Row
from offbeat.errors import CodeError, DeadlineError
from offbeat.process import child
from offbeat.rollout.reward_pool import RewardPool
from waiting import until

REWARDS = Path(__file__).parents[1] / "support" / "rewards.py"
ROW = Row("1>", "y")


def check(
    name: str, body: Callable[[RewardPool], Awaitable[None]], *, num_workers: int = 1, timeout_s: float = 20.0, memory_bytes: int = 0,
    allowed: tuple[str, ...] = (),
) -> None:
    async def main() -> None:
        async with RewardPool(
                f"{REWARDS}:{name}", num_workers=num_workers, timeout_s=timeout_s, log_dir=None, memory_bytes=memory_bytes,
                allowed=allowed) as pool:
            await body(pool)

    before = set(psutil.Process().children())
    asyncio.run(main())
    assert not set(psutil.Process().children()) - before


def test_a_process_that_does_not_start_in_time_names_the_setting_and_is_not_said_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_STACK_TIMEOUT_S", 0.01)

    async def main() -> None:
        async with RewardPool(f"{REWARDS}:equal", num_workers=1, timeout_s=20.0, log_dir=None, start_timeout_s=0.01):
            pass

    with pytest.raises(DeadlineError, match=r"waiting for reward 0 to start passed its deadline of 0\.01 s") as caught:
        asyncio.run(main())
    stack, remedy = caught.value.__notes__
    assert "does not answer: it is still starting; " in stack and remedy == "if the machine is busy, raise cluster.start_timeout_s"


def test_groups_are_scored_by_all_workers() -> None:
    async def body(pool: RewardPool) -> None:
        answers = await asyncio.gather(*(pool.score(["y", "n"] * i, ROW) for i in range(12)))
        assert answers == [[1.0, 0.0] * i for i in range(12)]
        assert await pool.check(ROW) == 1.0

    check("equal", body, num_workers=2)


def test_rewards_by_name_come_as_their_sum_which_knows_them() -> None:
    async def body(pool: RewardPool) -> None:
        good, bad, failed = await pool.score(["y", "nn", ""], ROW)
        assert (good, bad) == (1.5, 0.25)
        assert isinstance(good, NamedReward) and good.parts == {"right": 1.0, "short": 0.5}
        assert isinstance(failed, FailedReward)

    check("by_name", body)


def test_a_copy_that_a_reward_has_forked_never_answers_in_its_place() -> None:
    async def body(pool: RewardPool) -> None:
        (worker,) = set(psutil.Process().children()) - before
        assert await pool.score(["y"] * 20, ROW) == [1.0] * 20
        await until(lambda: all(child.status() == psutil.STATUS_ZOMBIE for child in worker.children()))

    before = set(psutil.Process().children())
    check("forks", body)


def test_a_completion_on_which_the_reward_raises_fails_alone_and_keeps_its_process() -> None:
    async def body(pool: RewardPool) -> None:
        processes = psutil.Process().children()
        first, failed, last = await pool.score(["y", "x", "y"], ROW)
        assert (first, last) == (1.0, 1.0)
        assert isinstance(failed, FailedReward) and math.isnan(failed)
        assert "raised ValueError: x is no number" in failed.reason
        assert psutil.Process().children() == processes

    check("raises_on_x", body)


def test_a_completion_on_which_the_reward_hangs_fails_alone_and_is_killed_at_its_own_deadline() -> None:
    async def body(pool: RewardPool) -> None:
        start = time.monotonic()
        mixed, other = await asyncio.gather(pool.score(["y", "x", "y"], ROW), pool.score(["y"], ROW))
        assert (mixed[0], mixed[2], other) == (1.0, 1.0, [1.0])
        assert isinstance(mixed[1], FailedReward)
        assert "hangs_on_x did not answer within rollout.reward_timeout_s = 1.2 s" in mixed[1].reason
        assert time.monotonic() - start < 40

    check("hangs_on_x", body, timeout_s=1.2)


def test_the_deadline_is_that_of_one_call_and_not_of_the_group() -> None:
    async def body(pool: RewardPool) -> None:
        assert not any(map(math.isnan, await pool.score(["y"] * 8, ROW)))  # 1.6 s

    check("slow", body, timeout_s=1.4)


def test_a_completion_on_which_the_reward_ends_its_process_fails_alone() -> None:
    async def body(pool: RewardPool) -> None:
        first, failed, last = await pool.score(["y", "x", "y"], ROW)
        assert (first, last) == (1.0, 1.0)
        assert isinstance(failed, FailedReward)
        assert re.search(r"dies_on_x ended its process: reward 0 .*exited with code 5", failed.reason)

    check("dies_on_x", body)


def test_what_was_scored_when_its_process_died_is_scored_once_more(tmp_path: Path) -> None:
    async def body(pool: RewardPool) -> None:
        assert await pool.score(["y", "z"], Row("1>", str(tmp_path / "died"))) == [1.0, 1.0]

    check("dies_once", body)


@pytest.mark.parametrize("how", ["x at once", "x bit by bit"])
def test_a_completion_on_which_the_reward_takes_too_much_memory_fails_alone(how: str) -> None:
    async def body(pool: RewardPool) -> None:
        first, failed, last = await pool.score(["y", how, "y"], ROW)
        assert (first, last) == (1.0, 1.0)
        assert isinstance(failed, FailedReward)
        assert "takes_memory_on_x ended its process: it took more memory than rollout.reward_memory_bytes = 500000000" in failed.reason

    check("takes_memory_on_x", body, memory_bytes=500_000_000)


def test_what_an_earlier_call_has_left_in_memory_fails_no_later_one() -> None:
    async def body(pool: RewardPool) -> None:
        for _ in range(6):  # each keeps 200 MB
            assert await pool.score(["y"], ROW) == [1.0]

    check("keeps_memory", body, memory_bytes=500_000_000)


def test_a_reward_sees_no_secrets_of_its_parent_but_those_that_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "JUDGE_API_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("DATABASE", "postgresql://alice:secret@db/offbeat")
    monkeypatch.setenv("PLAIN_SETTING", "7")

    async def body(pool: RewardPool) -> None:
        seen = ["WANDB_API_KEY", "HF_TOKEN", "DATABASE", "JUDGE_API_KEY", "PLAIN_SETTING", "PATH"]
        assert await pool.score(seen, ROW) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]

    check("sees_variable", body, allowed=("JUDGE_API_KEY",))


def test_a_reward_that_misses_a_secret_is_told_how_it_may_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")

    async def body(pool: RewardPool) -> None:
        with pytest.raises(CodeError, match=r"raised KeyError: 'JUDGE_API_KEY' .*; rollout.reward_env = \['JUDGE_API_KEY'\] would show it"):
            await pool.check(ROW)

    check("needs_a_key", body)


def test_what_a_workflow_cannot_have_scored_is_told_it_and_costs_no_process() -> None:
    async def body(pool: RewardPool) -> None:
        for completions, row in ([("y", None), ROW], [["y"], None]):
            with pytest.raises(CodeError, match="score takes a list of texts and the episode's row, got None"):
                await pool.score(completions, row)  # type: ignore[arg-type]
        assert await pool.score(["y"], ROW) == [1.0]

    check("equal", body)


def test_a_cancelled_call_leaves_a_working_pool() -> None:
    async def body(pool: RewardPool) -> None:
        call = asyncio.create_task(pool.score(["x"], ROW))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await pool.score(["y"], ROW) == [1.0]

    check("hangs_on_x", body)


def test_leaving_right_after_cancelling_twice_leaves_no_process() -> None:
    async def body(pool: RewardPool) -> None:
        call = asyncio.create_task(pool.score(["x"], ROW))
        for _ in range(2):
            await asyncio.sleep(0.1)
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    check("hangs_on_x", body)


def test_the_first_check_says_what_is_wrong_in_one_sentence() -> None:
    async def deadly(pool: RewardPool) -> None:
        with pytest.raises(CodeError, match="dies_on_x ended its process"):
            await pool.check(Row("1>", "x"))

    check("dies_on_x", deadly)


def test_a_reward_that_cannot_be_loaded_ends_the_start() -> None:
    async def never(pool: RewardPool) -> None:
        raise AssertionError("the pool opened")

    with pytest.raises(CodeError, match="did you mean 'equal'"):
        check("equals", never, num_workers=2)


def test_an_async_reward_is_awaited() -> None:
    async def body(pool: RewardPool) -> None:
        assert await pool.score(["y", "n"], ROW) == [1.0, 1.0]

    check("answers_later", body)


def test_several_rewards_are_added_by_their_weights_and_known_by_their_names() -> None:
    async def main() -> None:
        weights = {f"{REWARDS}:equal": 2.0, f"{REWARDS}:by_name": 1.0, f"{REWARDS}:applies_to_y": -0.5, f"{REWARDS}:answers_later": 1.0}
        async with RewardPool(weights, num_workers=1, timeout_s=20.0, log_dir=None) as pool:
            right, wrong, failed = await pool.score(["y", "nn", ""], ROW)
            assert isinstance(right, NamedReward) and isinstance(wrong, NamedReward)
            assert right.parts == {"equal": 2.0, "by_name.right": 1.0, "by_name.short": 0.5, "applies_to_y": -0.5, "answers_later": 1.0}
            assert right == 4.0
            assert wrong.parts == {"equal": 0.0, "by_name.right": 0.0, "by_name.short": 0.25, "answers_later": 1.0}
            assert isinstance(failed, FailedReward) and "the reward 'short': nan is not a number" in failed.reason

    asyncio.run(main())


def test_a_reward_of_groups_sees_all_completions_in_one_call() -> None:
    async def body(pool: RewardPool) -> None:
        first, second, failed = await pool.score(["y", "longer", ""], ROW)
        assert (first, second) == (1.0, 1.0)
        assert isinstance(first, NamedReward) and first.parts == {"longest": 0.0, "right": 1.0}
        assert isinstance(second, NamedReward) and second.parts == {"longest": 1.0, "right": 0.0}
        assert isinstance(failed, FailedReward) and "no judgement" in failed.reason
        assert await pool.score([], ROW) == []
        assert await pool.check(ROW) == 2.0

    check("best_of_group", body)


@pytest.mark.parametrize(("completion", "why"), [
    ("x", "raised ValueError: x is no number"), ("few", r"must return a list of 2 rewards, returned \[1.0\]"),
    ("hang", "did not answer within rollout.reward_timeout_s = 2 s"), ("die", "ended its process"),
])
def test_a_reward_of_groups_that_fails_fails_for_the_group_alone(completion: str, why: str) -> None:
    async def body(pool: RewardPool) -> None:
        rewards = await pool.score(["y", completion], ROW)
        assert [isinstance(reward, FailedReward) and bool(re.search(why, reward.reason)) for reward in rewards] == [True, True]
        assert await pool.score(["y"], ROW) == [2.0]

    check("best_of_group", body, timeout_s=2.0 if completion == "hang" else 20.0)
