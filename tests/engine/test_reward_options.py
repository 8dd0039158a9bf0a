"""What crosses to a reward model's process and back arrives as it was sent."""

import math

import pytest

from offbeat.data import wire
from offbeat.engine.reward_options import RewardModelOptions, ScoredTexts, TextsToScore


@pytest.mark.parametrize("message", [
    RewardModelOptions("folder", "bfloat16", "add", 64),
    TextsToScore(("7+5=", ({"role": "user", "content": "7+5"},)), ("12", "")),
    ScoredTexts((0.5, -math.inf), ("", "too long")),
])
def test_a_message_survives_the_wire(message: object) -> None:
    assert wire.decode(type(message), wire.encode(message)) == message
