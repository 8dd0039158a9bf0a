"""[model]: the tiny model and number formats."""

import pytest
from pydantic import ValidationError

from offbeat.config.model import ModelConfig, TinyConfig


def test_the_tiny_model_has_whole_groups_of_query_heads():
    tiny = TinyConfig()
    assert tiny.num_heads % tiny.num_kv_heads == 0


def test_without_a_path_a_tiny_float32_model_is_built():
    assert (ModelConfig().path, ModelConfig().dtype) == ("", "float32")


@pytest.mark.parametrize("values", [{"dtype": "float16"}, {"tiny": {"num_layers": 0}}, {"tiny": {"layers": 2}}])
def test_other_formats_and_sizes_are_refused(values):
    with pytest.raises(ValidationError):
        ModelConfig(**values)
