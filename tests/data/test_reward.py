"""What is taken for a reward, and what is not."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from offbeat.data.reward import FailedReward, check_reward


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.array(1), torch.tensor(1.0), Decimal(1), Fraction(1)])
def test_a_number_of_any_kind_is_a_reward(value) -> None:
    reward = check_reward(value)
    assert reward == 1.0 and type(reward) is float


@pytest.mark.parametrize("value", [
    None, "1", b"1", "good", math.nan, math.inf, -math.inf, 1e308, -1e19, 10**400, np.ones(1), torch.ones(1), [1.0], 1j, object()])
def test_anything_else_is_a_failure_that_says_what_it_was(value) -> None:
    reward = check_reward(value)
    assert isinstance(reward, FailedReward) and math.isnan(reward)
    assert "is not a number" in reward.reason
    assert check_reward(reward) is reward
