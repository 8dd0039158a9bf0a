"""Names of models: which can be trained, which only sampled, and which are not there."""

import pytest

from offbeat.config.service import ServeConfig
from offbeat.errors import ConfigError
from offbeat.service.base_models import BaseModels
from offbeat.service.errors import BadRequestError

MODELS = BaseModels("base", ("alias", "org/other"), ("teacher",))


def test_the_base_model_is_known_under_all_of_its_names_and_has_one() -> None:
    assert [MODELS.resolve(name) for name in ("base", "alias", "org/other", "teacher")] == ["base", "base", "base", "teacher"]
    for name in (None, "base", "alias", "org/other"):
        MODELS.check_trained(name)


def test_a_model_that_is_only_sampled_is_not_trained_and_one_that_is_unknown_is_neither() -> None:
    with pytest.raises(BadRequestError, match="'teacher' can only be sampled on this server; train 'base'"):
        MODELS.check_trained("teacher")
    with pytest.raises(BadRequestError, match="no base model 'x', only 'base', 'alias', 'org/other'$"):
        MODELS.check_trained("x")
    with pytest.raises(BadRequestError, match="no base model 'x', only 'base', 'alias', 'org/other', 'teacher'$"):
        MODELS.resolve("x")
    with pytest.raises(BadRequestError, match="no base model ''"):
        MODELS.resolve("")


def test_the_names_are_those_of_the_settings_and_each_is_one_models() -> None:
    settings = ServeConfig(aliases=("base", "b", "b"), sampling_models=("teacher=http://h:1", "teacher=http://h:2"))
    assert BaseModels.of("base", settings) == BaseModels("base", ("b",), ("teacher",))
    for name in ("base", "b"):
        with pytest.raises(ConfigError, match=f"serve.sampling_models names '{name}', which is the trained model"):
            BaseModels.of("base", ServeConfig(aliases=("b",), sampling_models=(f"{name}=http://h:1",)))
