"""What the ranks are asked in a step: the critic first, and the policy after the critic's warm-up."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.config.critic import CriticConfig
from offbeat.controller.state import LoopStep
from offbeat.controller.step_training import StepTraining

asked: list[tuple[str, Any, int]] = []


class Trained:
    """Ranks that note what they train on."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def train_step(self, batch: Any, *, num_minibatches: int) -> dict[str, float]:
        asked.append((self.name, batch, num_minibatches))
        return {"train/tokens": 7.0, "train/loss": 0.5}


def train(step: int, *, critic: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    asked.clear()
    monkeypatch.setattr("offbeat.controller.step_training.critic_batch", lambda batch, *, value_clip: f"{batch} for the critic")
    parts = SimpleNamespace(trainers=Trained("policy"), critic=Trained("critic") if critic else None)
    training = StepTraining(parts, SimpleNamespace(), num_minibatches=3, critic=CriticConfig(warmup_steps=2), seed=0)
    return asyncio.run(training.train("batch", LoopStep(step, step - 1, step)))


def test_without_a_critic_the_policy_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(1, critic=False, monkeypatch=monkeypatch) == {"train/tokens": 7.0, "train/loss": 0.5}
    assert asked == [("policy", "batch", 3)]


def test_the_policy_is_trained_after_the_warm_up_of_the_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(2, critic=True, monkeypatch=monkeypatch) == {"train/tokens": 7.0, "critic/loss": 0.5}
    assert [name for name, *_ in asked] == ["critic"]
    assert train(3, critic=True, monkeypatch=monkeypatch) == {"critic/loss": 0.5, "train/tokens": 7.0, "train/loss": 0.5}
    assert asked == [("critic", "batch for the critic", 3), ("policy", "batch", 3)]
