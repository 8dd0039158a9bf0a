"""[rollout]: staleness, sampling and dotted names."""

import pytest
from pydantic import ValidationError

from offbeat.config.rollout import RolloutConfig


def test_the_default_is_asynchronous_by_one_version_and_never_passes_the_bound():
    assert (RolloutConfig().max_head_offpolicyness, RolloutConfig().on_stale) == (1, "wait")
    assert RolloutConfig(max_head_offpolicyness=0).max_head_offpolicyness == 0


def test_the_default_workflow_is_named_by_module_and_function():
    module, _, function = RolloutConfig().workflow.partition(":")
    assert module.startswith("offbeat.rollout.workflows.") and function.isidentifier()


@pytest.mark.parametrize("values", [{"max_head_offpolicyness": -1}, {"group_size": 0}, {"top_p": 1.1}, {"on_stale": "x"}])
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ValidationError):
        RolloutConfig(**values)
