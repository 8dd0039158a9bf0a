"""`offbeat compare`: what is printed of two evaluations."""

import json
from pathlib import Path

import pytest

from evaluation.played import played
from offbeat.cli import main as cli
from offbeat.evaluation.files import encode_lines, write_lines
from offbeat.telemetry.evaluation_log import write_evaluation


@pytest.fixture
def both(tmp_path: Path) -> list[str]:
    """A run and a file of answers, in which the run's held-out prompts are answered better."""
    write_evaluation(tmp_path / "run", step=3, name="", lines=encode_lines(played([[1.0], [1.0], [0.5], [0.0]])))
    write_lines(
        tmp_path / "old.jsonl",
        [*encode_lines(played([[0.0], [1.0], [0.0], [0.25], [1.0]])), *encode_lines(played([[1.0]], name="sums"))])
    return [str(tmp_path / "old.jsonl"), str(tmp_path / "run")]


def test_differences_are_a_table_and_the_prompts_that_changed_follow(both: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *both, "--changes", "1"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[3:] == [
        "set       score        prompts      A      B   B - A     95 % interval      p  better  worse",
        "held-out  accuracy           4  0.250  0.500  +0.250  -0.276 to +0.609  1.000       1      0",
        "held-out  mean reward        4  0.312  0.625  +0.312  -0.125 to +0.750  0.500       2      1",
        "only A has sums",
        "held-out: the two evaluations did not ask the same prompts; the 4 that both asked are compared, and 1 of the first alone and 0 of"
        " the second alone are left out", "",
        "held-out: prompts whose mean reward changed most", "",
        "0.000 -> 1.000  0>", "  answer: 0", "  A: answer 0", "  B: answer 0"]


def test_the_same_as_json(both: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *both, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["first"], told["second"]) == tuple(both)
    [of_set] = told["sets"]
    assert (of_set["set"], of_set["prompts"], of_set["only_first"], of_set["only_second"]) == ("held-out", 4, 1, 0)
    assert of_set["differences"][0]["difference"] == 0.25 and of_set["differences"][0]["p_value"] == 1.0
    assert [change["prompt"] for change in of_set["changes"]] == ["0>", "2>", "3>"]


@pytest.mark.parametrize(("arguments", "why"), [
    (["gone", "gone"], "there is no file gone"), (["a", "b", "--changes", "-1"], "--changes must be at least 0, got -1"),
    (["a", "b", "--run.name", "x"], "compare takes no settings, got --run.name")])
def test_mistakes_are_one_sentence(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *arguments]) == 2
    assert why in capsys.readouterr().err
