"""What the tool says of two runs: the first number that differs, or that one of them failed."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from offbeat.config.load import load_config


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool, as a module."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    try:
        return importlib.import_module("same_numbers")
    finally:
        sys.path.pop(0)


def test_the_first_number_that_differs_is_named_with_both_values(tool: ModuleType) -> None:
    before = [("train/loss of step 1", "0.5"), ("train/loss of step 2", "0.125"), ("weights", "aa")]
    assert tool.difference(before, before) == ""
    assert tool.difference(before, [before[0], ("train/loss of step 2", "0.25"), ("weights", "bb")]) == (
        "train/loss of step 2 is 0.25, and was 0.125")
    assert tool.difference(before, before[:2]) == "2 numbers, and were 3"


def test_a_run_that_fails_is_a_difference(tool: ModuleType) -> None:
    failed = [("failed", "offbeat: there is no setting sft.total")]
    assert tool.difference(failed, [("weights", "aa")]) == "the run fails before the change: offbeat: there is no setting sft.total"
    assert tool.difference([("weights", "aa")], failed).startswith("the run fails after the change")


def test_every_kind_of_run_has_settings_that_are_allowed(tool: ModuleType) -> None:
    for settings in tool.KINDS.values():
        load_config(None, [*tool.SETTINGS.items(), *settings.items()])
