"""[data]: tasks, formats and bounds."""

import pytest
from pydantic import ValidationError

from offbeat.config.data import DataConfig
from offbeat.config.load import load_config
from offbeat.errors import ConfigError


def test_no_task_is_built_in_by_default_and_some_prompts_are_held_out():
    assert DataConfig().task == ""
    assert DataConfig().num_heldout(None) > 0


@pytest.mark.parametrize("values", [
    {"task": "chess"}, {"task": "reasoning_gym:"}, {"format": "csv"}, {"task_size": 0}, {"task_size": 65}])
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


def test_a_fifth_of_few_rows_is_held_out_and_what_is_given_is_kept():
    assert [DataConfig().num_heldout(rows) for rows in (4, 100, 1279, 1280, 10**6, None)] == [0, 20, 255, 256, 256, 256]
    assert [load_config(None, [("data.heldout_size", text)]).data.num_heldout(100) for text in ("0", "99", "auto")] == [0, 99, 20]


@pytest.mark.parametrize("text", ["-1", "true", "2.5", "some", "[4]"])
def test_what_is_no_number_of_rows_is_refused_in_one_sentence(text):
    with pytest.raises(ConfigError, match=r"^data.heldout_size: it must be an integer >= 0 or 'auto', got .*; use 0 to hold no"):
        load_config(None, [("data.heldout_size", text)])


def test_variables_of_a_template_keep_their_kinds():
    config = load_config(None, [("data.chat_template_kwargs", '{enable_thinking = false, budget = 3, mode = "brief"}')])
    assert config.data.chat_template_kwargs == {"enable_thinking": False, "budget": 3, "mode": "brief"}
    assert config.data.chat_template_kwargs["enable_thinking"] is False
