"""[run]: names and bounds."""

import pytest
from pydantic import ValidationError

from offbeat.config.run import RunConfig


@pytest.mark.parametrize("name", ["a", "sort8-2026.01_b", "7"])
def test_names_that_are_safe_folders_are_allowed(name):
    assert RunConfig(name=name).name == name


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "a b", "../x", "a\n"])
def test_names_that_could_leave_the_folder_of_runs_are_refused(name):
    with pytest.raises(ValidationError):
        RunConfig(name=name)


def test_a_run_has_at_least_one_step():
    with pytest.raises(ValidationError):
        RunConfig(total_steps=0)
