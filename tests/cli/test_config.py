"""`offbeat config`."""

import argparse

import pytest

from offbeat.cli import config
from offbeat.config.docs import render_docs
from offbeat.config.load import load_config, split_overrides
from offbeat.errors import ConfigError


def call(*argv):
    parser = argparse.ArgumentParser()
    config.add_parser(parser.add_subparsers())
    overrides, rest = split_overrides(["config", *argv])
    args = parser.parse_args(rest)
    return args.run(args, overrides)


def test_show_prints_the_file_with_its_overrides_as_a_file_that_loads(tmp_path, capsys):
    path = tmp_path / "a.toml"
    path.write_text("[rollout]\ngroup_size = 4\n")
    assert call("show", str(path), "--rollout.top_k", "7") == 0
    shown = tmp_path / "b.toml"
    shown.write_text(capsys.readouterr().out)
    assert load_config(str(shown)) == load_config(str(path), [("rollout.top_k", "7")])


def test_check_says_that_a_valid_configuration_is_valid(capsys):
    assert call("check", "--run.name", "first") == 0
    assert capsys.readouterr().out == "the default configuration with 1 override is valid; its run goes to runs/first\n"


def test_check_refuses_an_invalid_one():
    with pytest.raises(ConfigError, match=r"rollout.group_size must be >= 2, got 0"):
        call("check", "--rollout.group_size=0")


def test_docs_prints_the_reference(capsys):
    assert call("docs") == 0
    assert capsys.readouterr().out == render_docs()
