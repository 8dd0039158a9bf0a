"""The default reward."""

import pytest

from offbeat.data.row import Row
from offbeat.rollout.rewards.exact_match import exact_match


@pytest.mark.parametrize(("completion", "reward"), [("13", 1.0), (" 13\n", 1.0), ("1 3", 0.0), ("", 0.0), ("133", 0.0)])
def test_only_the_answer_itself_earns_the_reward(completion, reward):
    assert exact_match(completion, Row("31>", "13")) == reward
