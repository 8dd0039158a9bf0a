"""The table of objectives says who may choose each, and what its settings are."""

import pytest

from offbeat.config.objectives import OBJECTIVES, Constant, is_own, names_for, names_with, objective_of
from offbeat.errors import ConfigError


def test_each_chooser_has_objectives_of_its_own() -> None:
    assert set(names_for("algorithm")) - set(names_for("client")) == {"sapo", "gmpo", "dppo", "reinforce", "forward_kl", "reverse_kl"}
    assert set(names_for("client")) - set(names_for("algorithm")) == {"dro"}
    assert names_for("preference")[:2] == ("dpo", "robust") and not set(names_for("preference")) & set(names_for("algorithm"))
    assert {name for name, row in OBJECTIVES.items() if not row.chosen_by} == {"value", "mix", "bradley_terry"}


def test_only_imitation_drops_inputs_and_two_objectives_need_whole_sequences() -> None:
    assert [name for name, objective in OBJECTIVES.items() if objective.drops_inputs] == ["cross_entropy"]
    assert [name for name, objective in OBJECTIVES.items() if objective.by_sequence] == ["gspo", "gmpo"]


def test_an_objective_of_the_users_own_is_told_by_its_colon() -> None:
    assert is_own("a.py:f") and objective_of("a.py:f").chosen_by == ("algorithm",) and not is_own("ppo")


def test_the_settings_that_act_are_those_of_the_constants() -> None:
    assert names_with("label_smoothing") == ("dpo", "robust", "exo_pair")
    assert (names_with("dual_clip"), names_with("gamma"), names_with("desirable_weight")) == (("ppo",), ("simpo",), ("kto",))


@pytest.mark.parametrize(("constant", "value", "sentence"), [
    (Constant("tv", words=("tv", "kl")), "js", "c must be one of tv, kl, got 'js'"),
    (Constant(0.1, low=1e-6), 0.0, "c must be a finite number of at least 1e-06, got '0.0'"),
    (Constant(0.1, high=0.5), 0.6, "c must be a finite number of at least 0 and at most 0.5, got '0.6'")])
def test_a_constant_refuses_what_it_cannot_be(constant, value, sentence) -> None:
    constant.check("c", constant.default)
    with pytest.raises(ConfigError) as caught:
        constant.check("c", value)
    assert str(caught.value) == sentence
