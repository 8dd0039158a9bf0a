"""The base of all sections."""

import math

import pytest
from pydantic import ValidationError

from offbeat.config.base import Section, field
from offbeat.config.load import settings


class Example(Section):
    """A section."""

    size: float = field(1.0, "A size.", gt=0)


def test_sections_are_frozen():
    with pytest.raises(ValidationError):
        Example().size = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("values", [{"sise": 1.0}, {"size": 0.0}, {"size": math.inf}, {"size": math.nan}])
def test_unknown_keys_values_out_of_range_and_values_that_are_not_finite_are_refused(values):
    with pytest.raises(ValidationError):
        Example(**values)


def test_a_default_out_of_range_is_refused_too():
    class Wrong(Section):
        size: int = field(0, "A size.", ge=1)

    with pytest.raises(ValidationError):
        Wrong()


def test_every_setting_of_the_project_has_a_sentence():
    for key, info in settings():
        assert info.description and info.description.endswith("."), key
