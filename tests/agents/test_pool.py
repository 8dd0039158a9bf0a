"""Processes of user code: many episodes at a time, deadlines, processes that block or die."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from heard import TakenNotes
from offbeat.agents.pool import LostError, PlayPool
from offbeat.agents.task import AgentTask, Played
from offbeat.agents.worker import PlayLoadRequest, RunRequest
from offbeat.config.agent import AgentConfig
from offbeat.data.row import Row
from offbeat.errors import CodeError, DeadlineError
from waiting import wait_until

CODE = Path(__file__).parents[1] / "support" / "playing.py"


def with_pool(function: str, body: Callable[[PlayPool], Awaitable[None]], *, notes: TakenNotes | None = None, **agent) -> None:
    async def main() -> None:
        config = AgentConfig.model_validate({"episodes_per_process": 8} | agent)
        async with PlayPool(PlayLoadRequest(program=f"{CODE}:{function}"), config, log_dir=None, notes=notes) as pool:
            await body(pool)

    asyncio.run(main())


def playing() -> set[int]:
    """Processes of pools; other tests of this process may have children of their own."""
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if "offbeat.agents.worker:PlayWorker" in child.cmdline():
                found.add(child.pid)
    return found


async def play(pool: PlayPool, answer: str, *, timeout_s: float = 60) -> Played:
    task = AgentTask(Row("p", answer), "http://x/v1", "http://x", "key", "policy", 3, timeout_s)
    async with pool.seat() as seat:
        return await seat.call("run", RunRequest(seat.number, task), Played, timeout_s=timeout_s)


def test_many_episodes_wait_in_one_process_at_the_same_time() -> None:
    async def body(pool: PlayPool) -> None:
        start = time.monotonic()
        waiting = [asyncio.create_task(play(pool, "wait", timeout_s=1.0)) for _ in range(300)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(result) for result in results} == {DeadlineError} and time.monotonic() - start < 30
        assert (await play(pool, "0.5")).reward == 0.5

    with_pool("misbehave", body, episodes_per_process=300)


def test_what_user_code_raises_or_returns_wrongly_is_told_with_its_line_and_costs_nothing_else() -> None:
    async def body(pool: PlayPool) -> None:
        other = asyncio.create_task(play(pool, "wait", timeout_s=2))
        with pytest.raises(CodeError, match=r"misbehave raised ValueError: no idea at .*playing.py, line \d+$"):
            await play(pool, "raise")
        assert (await play(pool, "text")).failure.endswith("returned 'much' (str), which is not a reward: 'much' (str) is not a number")
        assert (await play(pool, "2")).outcome == 2.0
        assert not other.done()
        with pytest.raises(DeadlineError):
            await other

    with_pool("misbehave", body)


def test_a_process_that_dies_is_replaced_and_the_others_it_played_are_told() -> None:
    async def body(pool: PlayPool) -> None:
        other = asyncio.create_task(play(pool, "wait"))
        await asyncio.sleep(0.2)
        with pytest.raises(LostError, match="user code may have ended its process: play 0 .* exited with code 3"):
            await play(pool, "exit")
        with pytest.raises(LostError):
            await other
        assert (await play(pool, "1")).reward == 1.0

    with_pool("misbehave", body)


def test_a_process_whose_loop_is_blocked_is_replaced_and_it_is_said_where() -> None:
    notes = TakenNotes()

    async def body(pool: PlayPool) -> None:
        with pytest.raises(LostError, match=r"play 0 did nothing else for 0.5 s because user code blocked it at .*playing.py\", line \d+"):
            await play(pool, "block")
        assert (await play(pool, "1")).reward == 1.0
        ((kind, text),) = notes.all
        assert kind == "user_code" and text.endswith("which gets a thread")

    with_pool("misbehave", body, blocked_timeout_s=0.5, notes=notes)


def test_a_thread_that_never_ends_costs_its_episode_and_the_process_is_ended_when_the_others_are_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offbeat.agents.pool._CLOSE_TIMEOUT_S", 0.3)

    async def body(pool: PlayPool) -> None:
        before = playing()
        with pytest.raises(DeadlineError):
            await play(pool, "hang", timeout_s=0.5)
        assert (await play(pool, "1")).reward == 1.0
        after = playing()
        assert len(after) == 1 and not before & after

    with_pool("hang", body)


def test_episodes_are_spread_over_processes_and_wait_for_a_place() -> None:
    async def body(pool: PlayPool) -> None:
        async with pool.seat() as first, pool.seat() as second:
            assert first._process is not second._process
            third = asyncio.create_task(play(pool, "1"))
            await asyncio.sleep(0.1)
            assert not third.done()
        assert (await third).reward == 1.0

    with_pool("hang", body, processes=2, episodes_per_process=1)


def test_code_that_cannot_be_loaded_ends_the_start_and_leaves_no_process() -> None:
    with pytest.raises(CodeError, match="did you mean 'misbehave'"):
        with_pool("misbehav", lambda _pool: asyncio.sleep(0), processes=2)
    wait_until(lambda: not playing(), timeout_s=10)


def test_secrets_are_hidden_from_the_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = tmp_path / "peek.py"
    code.write_text("import os\ndef peek(task):\n    return {name: float('MY_' + name in os.environ) for name in ('TOKEN', 'JUDGE_KEY')}\n")
    monkeypatch.setenv("MY_TOKEN", "1")
    monkeypatch.setenv("MY_JUDGE_KEY", "1")

    async def main() -> Played:
        request = PlayLoadRequest(program=f"{code}:peek")
        async with PlayPool(request, AgentConfig(env=("MY_JUDGE_KEY",), memory_bytes=4 << 30), log_dir=tmp_path) as pool:
            return await play(pool, "")

    assert asyncio.run(main()).parts == {"TOKEN": 0.0, "JUDGE_KEY": 1.0}
    assert (tmp_path / "play-0.log").exists() and os.environ["MY_TOKEN"]
