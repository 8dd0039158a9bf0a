"""Optional parts: one sentence where one is missing."""

import tomllib
from pathlib import Path

import pytest

from offbeat.errors import MissingExtraError
from offbeat.extras import TRAIN, require

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_what_is_there_is_not_complained_about():
    require("train", ("json", "torch"), wanted_by="offbeat train")


def test_a_missing_part_is_named_with_the_command_that_installs_it():
    with pytest.raises(MissingExtraError) as caught:
        require("train", ("json", "no_torch"), wanted_by="offbeat train")
    assert str(caught.value) == "offbeat train needs no_torch, which is not installed; run pip install 'offbeat[train]'"
    with pytest.raises(MissingExtraError, match="needs no_torch, no_transformers and no_tokenizers, which are not installed;"):
        require("train", ("no_torch", "no_transformers", "no_tokenizers"), wanted_by="offbeat train")


def test_what_training_looks_for_is_in_its_extra_and_not_in_the_base():
    extra = {requirement.partition(">")[0].replace("-", "_") for requirement in PROJECT["optional-dependencies"]["train"]}
    base = {requirement.partition(">")[0].replace("-", "_") for requirement in PROJECT["dependencies"]}
    assert set(TRAIN) <= extra and not extra & base
