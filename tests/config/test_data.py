"""[data]: tasks, formats and bounds."""

import pytest
from pydantic import ValidationError

from offbeat.config.data import DataConfig
from offbeat.config.load import load_config
from offbeat.errors import ConfigError


def test_no_task_is_built_in_by_default_and_some_prompts_are_held_out():
    assert DataConfig().task == ""
    assert DataConfig().heldout_size > 0


@pytest.mark.parametrize("values", [
    {"task": "chess"}, {"task": "reasoning_gym:"}, {"format": "csv"}, {"task_size": 0}, {"task_size": 65}, {"heldout_size": -1}])
def test_unknown_tasks_and_formats_and_sizes_out_of_range_are_refused(values):
    with pytest.raises(ValidationError):
        DataConfig(**values)


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"data.prompt": "{q"}, "data.prompt: it has a single '{' at character 0; write {column} for a column, and '{{' for the brace"),
    ({"data.prompt": "{q}", "data.prompt_field": "q"}, "data.prompt and data.prompt_field exclude each other, got '{q}' and 'q'; give one"),
    ({"data.prompt": "{q}", "data.task": "addition"}, "data.prompt and data.task exclude each other"),
    ({"data.answer_field": "a", "data.task": "addition"}, "data.answer_field must be empty with data.task = 'addition'"),
    ({"data.chat_template_kwargs": "{tools = true}"}, "data.chat_template_kwargs: it must not hold 'tools', which Offbeat itself gives"),
])
def test_what_contradicts_itself_is_refused(settings, sentence):
    with pytest.raises(ConfigError) as caught:
        load_config(None, list(settings.items()))
    assert sentence in str(caught.value)


def test_variables_of_a_template_keep_their_kinds():
    config = load_config(None, [("data.chat_template_kwargs", '{enable_thinking = false, budget = 3, mode = "brief"}')])
    assert config.data.chat_template_kwargs == {"enable_thinking": False, "budget": 3, "mode": "brief"}
    assert config.data.chat_template_kwargs["enable_thinking"] is False
