"""Optional parts: one sentence where one is missing."""

import subprocess
import sys
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


def test_a_function_of_the_python_interface_without_the_extra_says_in_a_sentence_what_installs_it(tmp_path):
    """As in the first cell of a notebook where `pip install offbeat` was all that was done; finished runs need no extra."""
    blocked = (*TRAIN, "huggingface_hub")
    program = f"""
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] in {blocked!r} else find(name, path, target)
importlib.machinery.PathFinder.find_spec = find_spec
import offbeat
print(offbeat.Row(prompt="1 + 1 =", answer="2").answer, offbeat.Run.__name__)
offbeat.train(data=[], reward=len)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout == "2 Run\n"
    assert done.stderr.splitlines()[-1] == (
        "offbeat.errors.MissingExtraError: offbeat.train needs torch, transformers, tokenizers, safetensors, sqlalchemy, prometheus_client"
        " and math_verify, which are not installed; run pip install 'offbeat[train]'")
    assert "huggingface_hub" not in done.stderr
