"""Bridges: lines over a pipe, deaths and cancellations, against a small bridge; and verifiers itself, where it is installed.

`OFFBEAT_TEST_VERIFIERS` names Pythons that have it, separated by colons; `make verifiers` makes one.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from offbeat.agents import bridge
from offbeat.agents.bridge import BridgePlayer
from offbeat.agents.pool import LostError
from offbeat.agents.task import AgentTask, Played
from offbeat.config.agent import AgentConfig
from offbeat.data.row import Row
from offbeat.errors import CodeError
from scripted_model import play_agent

SUPPORT = Path(__file__).parents[1] / "support"
PYTHONS = [python for python in os.environ.get("OFFBEAT_TEST_VERIFIERS", "").split(":") if python]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a body with the bridge of tests/support."""
    monkeypatch.setattr(bridge.bridges, "__file__", str(SUPPORT / "__init__.py"))

    def run(body: Callable[[BridgePlayer], Coroutine[Any, Any, None]], *, environment: str = "some", **options: Any) -> None:
        async def main() -> None:
            config = AgentConfig(
                environment=f"small:{environment}", options=tuple(f"{name}={value}" for name, value in options.items()), model="m",
                max_turns=3, episodes_per_process=9, memory_bytes=0)
            player = BridgePlayer(config, log_dir=None)
            async with player:
                await body(player)

        asyncio.run(main())

    return run


def task(answer: str) -> AgentTask:
    return AgentTask(Row("p", answer), "http://x/v1", "http://x", "key", "m", 3, 60)


def test_episodes_are_answered_in_any_order(small: Callable[..., Any]) -> None:
    async def body(player: BridgePlayer) -> None:
        slow = asyncio.create_task(player.play(task("0.5")))
        assert await player.play(task("0.1")) == Played(0.1, {"slept": 0.1}, metrics={"naps": 1.0})
        assert not slow.done() and (await slow).parts == {"slept": 0.5}
        with pytest.raises(CodeError, match="small:some failed: ValueError: no number"):
            await player.play(task("fail"))

    small(body)


def test_a_cancelled_episode_is_cancelled_there_and_a_dead_bridge_is_started_again(small: Callable[..., Any]) -> None:
    async def body(player: BridgePlayer) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await player.play(task("60"))
        assert (await player.play(task("cancelled"))).reward == 1.0
        with pytest.raises(LostError, match="the bridge to small:some ended"):
            await asyncio.gather(player.play(task("60")), player.play(task("exit")))
        assert (await player.play(task("cancelled"))).reward == 0.0

    small(body)


def test_an_environment_that_cannot_be_loaded_is_told(small: Callable[..., Any]) -> None:
    with pytest.raises(CodeError, match=r"agent.environment 'small:missing' cannot be loaded under .*: ModuleNotFoundError: missing"):
        small(lambda _player: asyncio.sleep(0), environment="missing")


@pytest.mark.skipif(not PYTHONS, reason="OFFBEAT_TEST_VERIFIERS names no Python that has verifiers")
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("environment", "options", "turns"), [("shout_classic", [], 1), ("shout_taskset", ["harness=shout_taskset"], 2)])
def test_environments_of_verifiers_are_played_and_recorded(
    python: str, environment: str, options: list[str], turns: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    monkeypatch.chdir(SUPPORT / "verifiers")
    try:
        trajectories, model = play_agent(
            Row("", "", {"index": "1"}), environment=f"verifiers:{environment}", options=options, python=python, timeout_s=200,
            say=lambda _: "HELLO", log_dir=tmp_path)
    except CodeError as exc:
        if "load_environment" in str(exc) or "has no attribute" in str(exc):
            pytest.skip(f"another line of verifiers: {exc}")
        raise
    assert [t.reward for t in trajectories] == [1.0, 1.0] and [len(t.turns) for t in trajectories] == [turns] * 2
    sampled = sorted(token for _, sample in model.calls for token in sample.token_ids)
    assert sorted(token for t in trajectories for token in t.tokens[t.loss_mask]) == sampled
    assert "word 1" in model.tokenizer.decode(model.calls[0][0])
