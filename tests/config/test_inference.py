"""[inference]: bounds."""

import pytest
from pydantic import ValidationError

from offbeat.config.inference import InferenceConfig


def test_a_context_of_zero_takes_the_models():
    assert InferenceConfig().max_context == 0


def test_threads_are_chosen_unless_they_are_given():
    assert InferenceConfig().threads == 0
    assert InferenceConfig(threads=3).threads == 3
    with pytest.raises(ValidationError):
        InferenceConfig(threads=-1)


@pytest.mark.parametrize("name", ["num_engines", "min_engines", "max_running", "max_queued"])
def test_counts_start_at_one(name):
    assert getattr(InferenceConfig(**{name: 1}), name) == 1
    with pytest.raises(ValidationError):
        InferenceConfig(**{name: 0})


@pytest.mark.parametrize("arguments", [("--api-key", "secret"), ("--api-key=secret",)])
def test_a_key_among_the_arguments_of_servers_is_refused(arguments):
    with pytest.raises(ValidationError, match="must not hold --api-key; leave it out") as told:
        InferenceConfig(arguments=arguments)
    assert "secret" not in str(told.value.errors()[0]["msg"])
