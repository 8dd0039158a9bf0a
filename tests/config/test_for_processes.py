"""Sections for ranks and engines."""

import pytest

from offbeat.config.for_processes import EngineConfig, RankConfig
from offbeat.config.root import Config


def test_sections_for_ranks_and_engines_are_those_of_the_configuration():
    config = Config.model_validate({"run": {"name": "a", "dir": "b"}, "train": {"num_ranks": 3}, "inference": {"num_engines": 2}})
    assert config.for_ranks.train is config.train
    assert config.for_engines.inference == config.inference.model_copy(update={"batch_invariant": False}), "of an asynchronous run"
    assert config.for_ranks.run_dir == config.for_engines.run_dir == config.run_dir
    assert config.for_plan.cluster is config.cluster
    assert config.planned(config.for_plan) == config
    assert config.for_engines.canary_dtype == config.canary_dtype


@pytest.mark.parametrize(("kind", "name"), [(RankConfig, "for_ranks"), (EngineConfig, "for_engines")])
def test_sections_for_processes_survive_the_way_there(kind, name):
    sent = getattr(Config.model_validate({"run": {"name": "a"}, "model": {"lora": {"rank": 4}}, "rollout": {"temperature": 0.7}}), name)
    assert kind.model_validate_json(sent.model_dump_json()) == sent
