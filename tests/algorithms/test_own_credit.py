"""Credit from a file: what it sees, where its advantages go, and what is refused."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offbeat.algorithms.experience import make_batch
from offbeat.algorithms.own_credit import check_credit
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.reward import NamedReward
from offbeat.data.trajectory import Group, Trajectory, TurnEnd
from offbeat.errors import CodeError, OwnCodeError

FILE = Path(__file__).parents[1] / "support" / "own_credits.py"


def trajectory(mask, reward, *, versions=None, reason="stop"):
    """A sample whose tokens were generated where `mask` has ones."""
    mask = np.array(mask, np.bool_)
    given = np.where(mask, 3 if versions is None else versions, -1)
    return Trajectory(np.arange(len(mask)), mask, np.where(mask, -0.5, 0), given, reward, reason)


GROUPS = [
    Group("0:0", 0, (trajectory([0, 0, 1, 1, 1], 1.0), trajectory([0, 0, 1], 0.0), trajectory([0, 1], np.nan))),
    Group("0:1", 0, ()),
    Group("0:2", 0, (
        trajectory([0, 1, 1, 0, 0, 1, 1, 1], 2.0, versions=[0, 4, 4, 0, 0, 5, 5, 6]), trajectory([0, 1, 0, 1], 1.0, reason="length"))),
]


def advantages(function, groups=GROUPS, **settings):
    """The advantages of all targets, sequence by sequence."""
    config = AlgorithmConfig(credit=f"{FILE}:{function}", constants={"decay": 0.5}, drop_zero_advantage=False, **settings)
    batch = make_batch(groups, config=config, max_new_tokens=8)
    return [batch.columns["advantages"][a:b].tolist() for a, b in zip(batch.target_offsets, batch.target_offsets[1:], strict=False)]


def test_one_number_for_a_sample_goes_to_all_of_its_tokens_and_samples_without_a_reward_are_in_no_mean() -> None:
    assert advantages("centred") == [[0.5] * 3, [-0.5], [0.5] * 5, [-0.5] * 2]


def test_numbers_for_tokens_know_turns_and_versions() -> None:
    assert advantages("later_turns_less") == [[0.5] * 3, [-0.5], [0.5, 0.5, 0.25, 0.25, 0.25], [-0.5, -0.25]]
    assert advantages("by_version") == [[3] * 3, [3], [4, 4, 5, 5, 6], [3, 3]]


def test_rewards_are_shaped_and_named_rewards_are_as_they_were_given() -> None:
    assert advantages("centred", reward_scale=2.0) == [[1.0] * 3, [-1.0], [1.0] * 5, [-1.0] * 2]
    named = [Group("0:0", 0, tuple(trajectory([0, 1], NamedReward(parts)) for parts in ({"right": 1.0, "form": 0.5}, {"form": 0.25})))]
    assert advantages("right_alone", named, reward_scale=2.0) == [[1.0], [0.0]]


def test_turns_that_a_workflow_tells_and_what_they_have_earned_are_seen_and_an_episode_counts_once_in_a_mean() -> None:
    chain = trajectory([0, 1, 1, 1, 0], 1.0)
    group = [
        replace(chain, episode=4, agent="white", turns=(TurnEnd(3, 2.0, "shop"), TurnEnd(4))), replace(chain, episode=4, agent="white"),
        trajectory([0, 1], 0.0)]
    assert advantages("centred", [Group("0:0", 0, tuple(group))]) == [[1.5] * 3, [1.5] * 3, [-1.5]]
    assert advantages("by_turn_reward", [Group("0:0", 0, tuple(group))]) == [[2.0, 2.0, 0.0], [0.0] * 3, [0.0]]
    assert advantages("in_the_shop", [Group("0:0", 0, tuple(group))]) == [[1.0, 1.0, 0.0], [0.0] * 3, [0.0]]


def test_samples_that_are_left_out_of_the_loss_have_no_tokens_but_a_reward() -> None:
    assert advantages("centred", mask_truncated=True) == [[0.5] * 3, [-0.5], [0.5] * 5]
    assert advantages("by_version", mask_truncated=True) == [[3] * 3, [3], [4, 4, 5, 5, 6]]


def test_samples_of_advantage_0_are_dropped_as_configured_and_nothing_is_asked_of_no_samples() -> None:
    config = AlgorithmConfig(credit=f"{FILE}:centred")
    equal = [Group("0:0", 0, (trajectory([0, 1], 1.0), trajectory([0, 1], 1.0)))]
    assert len(make_batch(equal, config=config, max_new_tokens=8)) == 0
    assert len(make_batch([], config=AlgorithmConfig(credit=f"{FILE}:raises"), max_new_tokens=8)) == 0


def test_the_same_credit_as_dr_grpo_gives_the_same_batch() -> None:
    rng = np.random.default_rng(0)
    groups = [
        Group(f"0:{g}", 0, tuple(trajectory([0] * 3 + [1] * int(n), float(r)) for n, r in zip(
            rng.integers(1, 9, 5), rng.standard_normal(5), strict=True))) for g in range(4)]
    own = make_batch(groups, config=AlgorithmConfig(credit=f"{FILE}:centred"), max_new_tokens=8)
    built_in = make_batch(groups, config=AlgorithmConfig(scale="none"), max_new_tokens=8)
    for name, values in built_in.columns.items():
        np.testing.assert_allclose(own.columns[name], values, rtol=1e-6)


@pytest.mark.parametrize(("function", "sentence"), [
    ("too_few", "must return an array of 4 numbers, one for each sample, or a list of 4 arrays, one number for each trained token of a"
     " sample, got an array of shape (2,)"),
    ("too_short", "got a list of 4 with shapes [(2,), (0,), (4,), (1,)]"),
    ("endless", "must return finite numbers, got "),
    ("text", "must return an array of 4 numbers"),
    ("nothing", "must return an array of 4 numbers"),
    ("raises", f"raised KeyError: 'missing' at {FILE}, line "),
])
def test_what_is_wrong_with_an_own_credit_is_said_in_a_sentence(function, sentence) -> None:
    with pytest.raises(OwnCodeError) as caught:
        advantages(function)
    assert str(caught.value).startswith(f"credit '{FILE}:{function}' ") and sentence in str(caught.value)
    with pytest.raises(CodeError, match=r"algorithm.credit: credit .* when it was tried out on made-up samples"):
        check_credit(f"{FILE}:{function}", {})


@pytest.mark.parametrize("function", ["centred", "later_turns_less", "right_alone", "by_version"])
def test_a_credit_that_works_is_found_right(function) -> None:
    check_credit(f"{FILE}:{function}", {"decay": 0.5})


def test_a_credit_that_imports_torch_is_refused() -> None:
    code = f"from offbeat.algorithms.own_credit import check_credit; check_credit('{FILE}:imports_torch', dict())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "imports torch, which the controller never loads; compute with numpy" in done.stderr.splitlines()[-1]
