"""What is taken for a reward, and what is not."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from offbeat.data.reward import LARGEST_REWARD, FailedReward, NamedReward, check_reward, weigh


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.array(1), torch.tensor(1.0), Decimal(1), Fraction(1)])
def test_a_number_of_any_kind_is_a_reward(value) -> None:
    reward = check_reward(value)
    assert reward == 1.0 and type(reward) is float


@pytest.mark.parametrize("value", [
    None, "1", b"1", bytearray(b"1"), "good", math.nan, math.inf, -math.inf, 1e308, -1e13, 10**400, np.ones(1), torch.ones(1), [1.0], 1j,
    np.array("1"), np.complex64(1), np.datetime64(1, "s"), object()])
def test_anything_else_is_a_failure_that_says_what_it_was(value) -> None:
    reward = check_reward(value)
    assert isinstance(reward, FailedReward) and math.isnan(reward)
    assert "is not a number" in reward.reason
    assert check_reward(reward) is reward


class Stubborn:
    """Cannot even be looked at."""

    def __float__(self):
        raise KeyError("no")

    def __repr__(self):
        raise KeyError("no")

    @property
    def ndim(self):
        raise KeyError("no")


def test_a_value_that_raises_when_it_is_looked_at_is_a_failure() -> None:
    assert check_reward(Stubborn()).reason == "something (Stubborn) is not a number"


def test_the_largest_reward_has_a_square_that_float32_can_sum_over_all_parameters() -> None:
    assert check_reward(1e12) == 1e12
    assert math.isnan(check_reward(1.1e12))
    assert np.isfinite(np.float32(LARGEST_REWARD) ** 2 * np.float32(1e12))


def test_rewards_by_name_are_their_sum_and_keep_their_names() -> None:
    reward = check_reward({"right": np.float32(1), "form": True, "length": -0.5})
    assert isinstance(reward, NamedReward) and reward == 1.5
    assert reward.parts == {"right": 1.0, "form": 1.0, "length": -0.5}
    assert check_reward(reward) is reward


@pytest.mark.parametrize(("value", "why"), [
    ({}, "is not a mapping of names to numbers"), ({1: 2.0}, "is not a mapping of names to numbers"),
    ({"right": 1.0, "form": "good"}, "the reward 'form'"), ({"right": math.nan}, "nan is not a number"),
    ({"right": {"exact": 1.0}}, "a mapping is not a number"),
])
def test_a_mapping_that_holds_anything_but_numbers_by_name_is_a_failure(value, why: str) -> None:
    reward = check_reward(value)
    assert isinstance(reward, FailedReward) and why in reward.reason


def test_rewards_of_several_functions_are_one_that_knows_its_parts():
    weights = {"a.py:right": 1.0, "pkg.mod:form": 0.5, "judge:dir/style.toml": -2.0}
    values = {"a.py:right": 1.0, "pkg.mod:form": NamedReward({"short": 1.0, "clean": 0.0}), "judge:dir/style.toml": 0.25}
    reward = weigh(values, weights)
    assert reward == 1.0 and isinstance(reward, NamedReward)
    assert reward.parts == {"right": 1.0, "form.short": 0.5, "form.clean": 0.0, "style": -0.5}


def test_a_reward_that_does_not_apply_is_left_out_and_one_that_failed_fails_the_whole():
    weights = {"a.py:right": 1.0, "a.py:form": 0.5}
    only = weigh({"a.py:right": 1.0, "a.py:form": None}, weights)
    assert isinstance(only, NamedReward) and only.parts == {"right": 1.0}
    none = weigh({"a.py:right": None, "a.py:form": None}, weights)
    assert isinstance(none, FailedReward) and none.reason == "none of the rewards applies: all of them gave None"
    failed = FailedReward("why")
    assert weigh({"a.py:right": 1.0, "a.py:form": failed}, weights) is failed


def test_parts_of_a_mapping_that_do_not_apply_are_left_out():
    reward = check_reward({"right": 1, "form": None})
    assert isinstance(reward, NamedReward) and reward.parts == {"right": 1.0}
    assert isinstance(check_reward({"form": None}), FailedReward)
