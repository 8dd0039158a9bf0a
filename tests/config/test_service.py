"""[serve]: the service for many tenants."""

import pytest
from pydantic import ValidationError

from offbeat.config.load import load_config
from offbeat.config.service import ServeConfig
from offbeat.errors import ConfigError


def test_nobody_but_this_machine_is_served_unless_asked_for() -> None:
    serve = ServeConfig()
    assert serve.host == "127.0.0.1" and not serve.keys and not serve.public_status


@pytest.mark.parametrize("url", ["postgresql://alice:hunter2@db/offbeat", "postgresql://db/offbeat?user=alice&password=hunter2"])
def test_a_password_in_the_databases_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="serve.database: the database's URL must not contain a password, .* set PGPASSWORD") as told:
        load_config(None, [("serve.database", url)])
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize("url", ["", "postgresql://alice@db/offbeat", "sqlite:////tmp/a.db", "postgresql:///offbeat?host=/run/postgresql"])
def test_other_urls_of_databases_are_taken(url: str) -> None:
    assert load_config(None, [("serve.database", url)]).serve.database == url


@pytest.mark.parametrize("values", [
    {"port": -1}, {"port": 65536}, {"data_dir": ""}, {"host": ""}, {"max_tokens_per_pass": 0}, {"gap_patience_s": 0},
    {"max_models": -1}, {"max_disk_bytes": -1}, {"max_body_bytes": 10}, {"result_retention_s": 60}, {"max_samples_in_flight": 0},
    {"max_connections": 15}, {"max_connections_per_address": 0},
    {"stable_reinforce": "gspo"}, {"sampling_models": ["http://127.0.0.1:1"]}, {"sampling_models": ["name=127.0.0.1:1"]},
    {"sampling_models": ["=http://127.0.0.1:1"]}, {"sampling_engine": "sglang"}])
def test_settings_that_cannot_work_are_refused(values: dict) -> None:
    with pytest.raises(ValidationError):
        ServeConfig(**values)


def test_engines_of_a_model_that_is_only_sampled_are_named_one_by_one() -> None:
    serve = ServeConfig(sampling_models=("a/teacher=http://h:1", "judge=https://h:2/x?y=z", "a/teacher=http://h:3"))
    assert serve.sampling_urls == {"a/teacher": ("http://h:1", "http://h:3"), "judge": ("https://h:2/x?y=z",)}
    with pytest.raises(ConfigError, match=r"serve\.sampling_models: each must be NAME=URL of an engine, such as .*, got 'judge'"):
        load_config(None, [("serve.sampling_models", '["judge"]')])
