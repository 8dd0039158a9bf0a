"""What is refused of an objective from a file before a run, each in one sentence."""

from pathlib import Path

import pytest

from offbeat.algorithms.objectives import policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.errors import CodeError
from offbeat.losses.own_check import OwnObjectiveCheck, check_objective
from offbeat.user_code.handshake import Handshake

FILE = Path(__file__).parents[1] / "support" / "own_losses.py"


def check(function, **settings):
    config = AlgorithmConfig(objective=f"{FILE}:{function}", **{"constants": {"low": 0.8, "high": 1.2}} | settings)
    check_objective(policy_loss(config), name=config.objective, drops=config.drop_zero_advantage)


@pytest.mark.parametrize(("function", "settings"), [
    ("clipped", {}), ("clipped", {"preset": "prime_rl"}), ("clipped", {"preset": "deepseek_v32", "num_minibatches": 4}),
    ("geometric", {}), ("everything", {"objective_reads": ("reference", "entropy"), "drop_zero_advantage": False}),
    ("squared", {"drop_zero_advantage": False}),
])
def test_an_objective_that_works_is_found_right(function, settings) -> None:
    check(function, **settings)


@pytest.mark.parametrize(("function", "sentence"), [
    ("bad_shape", "must return losses of shape (22,), one for each token, got shape (), when it was tried out on made-up tokens"),
    ("raises", f"raised KeyError: 'missing' at {FILE}, line "),
    ("overflows", "gives the loss "),
    ("endless_slope", "has a gradient that is not finite at a token whose values are finite"),
    ("without_gradient", "has no gradient: compute its losses from tokens.logprobs"),
    ("squared", "has a gradient at tokens of advantage 0, and algorithm.drop_zero_advantage = true leaves sequences of those out; set it"),
    ("over_the_batch", "returns different losses when a batch is split in halves"),
    ("random", "returns different losses when only masked tokens change, or when it is called again with the same"),
    ("counts_calls", "returns different losses when only masked tokens change, or when it is called again with the same"),
    ("sums_all", "returns different losses when masked tokens stand among the others; sum over a sequence with tokens.over_sequences"),
    ("cliped", "did you mean 'clipped'?"),
])
def test_what_cannot_work_is_refused_in_one_sentence(function, sentence) -> None:
    with pytest.raises(CodeError) as caught:
        check(function)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_the_check_takes_settings_as_json() -> None:
    settings = {"objective": f"{FILE}:clipped", "constants": {"low": 0.8, "high": 1.2}}
    algorithm = AlgorithmConfig.model_validate(settings)
    assert OwnObjectiveCheck().handle("load", Handshake(algorithm.model_dump_json().encode()).pack()) == b""
