"""[data]: tasks, formats and bounds."""

import pytest
from pydantic import ValidationError

from offbeat.config.data import DataConfig


def test_no_task_is_built_in_by_default_and_some_prompts_are_held_out():
    assert DataConfig().task == ""
    assert DataConfig().heldout_size > 0


@pytest.mark.parametrize("values", [
    {"task": "chess"}, {"task": "reasoning_gym:"}, {"format": "csv"}, {"task_size": 0}, {"task_size": 65}, {"heldout_size": -1}])
def test_unknown_tasks_and_formats_and_sizes_out_of_range_are_refused(values):
    with pytest.raises(ValidationError):
        DataConfig(**values)
