"""What is shown of errors that leave a public function."""

import re
import traceback
from typing import Any

import pytest

import offbeat
from offbeat.api.sentence import short_errors
from offbeat.errors import CodeError, ConfigError, OffbeatError, RunError


def shown(function: Any, *arguments: Any, **keywords: Any) -> list[str]:
    """The lines that Python prints where nobody catches the error."""
    with pytest.raises(OffbeatError) as caught:
        function(*arguments, **keywords)
    return "".join(traceback.format_exception(caught.value)).splitlines()


def test_a_mistake_shows_the_callers_line_one_frame_and_the_sentence() -> None:
    lines = shown(offbeat.train, total_stepz=2)
    files = [re.sub(r'.*[/"](\w+\.py)".*', r"\1", line) for line in lines if line.startswith("  File ")]
    assert files == ["test_sentence.py", "sentence.py"]
    assert lines[-1].startswith("offbeat.errors.ConfigError: total_stepz is not a setting; did you mean run.total_steps")


@pytest.mark.parametrize("name", ["train", "sft", "dpo", "reward_model", "evaluate"])
def test_every_function_that_runs_something_is_so(name: str) -> None:
    assert sum(line.startswith("  File ") for line in shown(getattr(offbeat, name), no_such_setting=1)) == 2


def test_causes_and_notes_of_a_mistake_are_left_out() -> None:
    @short_errors
    def fail() -> None:
        cause = KeyError("inner")  # raised nowhere in code of the user's own
        error = CodeError("the reward failed")
        error.add_note("where the process was")
        raise error from cause

    lines = shown(fail)
    assert lines[-1] == "offbeat.errors.CodeError: the reward failed" and "inner" not in "".join(lines)


def test_a_cause_in_the_users_own_code_is_shown_with_its_line() -> None:
    def workflow() -> None:
        raise KeyError("inner")

    @short_errors
    def fail() -> None:
        try:
            workflow()
        except KeyError as exc:
            raise CodeError("the last 64 groups failed") from exc

    lines = shown(fail)
    assert any("in workflow" in line for line in lines) and "KeyError: 'inner'" in lines
    assert lines[-1] == "offbeat.errors.CodeError: the last 64 groups failed"


def test_a_failed_run_keeps_what_its_processes_said() -> None:
    @short_errors
    def fail() -> None:
        error = RunError("rank 1 died")
        error.add_note("last lines of rank-1.log:\nout of memory")
        raise error

    assert shown(fail)[-3:] == ["offbeat.errors.RunError: rank 1 died", "last lines of rank-1.log:", "out of memory"]


def test_frames_of_the_users_own_code_stay() -> None:
    def callback() -> None:
        raise ConfigError("no")

    assert "in callback" in "".join(shown(short_errors(callback)))


def test_other_errors_are_left_alone() -> None:
    @short_errors
    def fail() -> None:
        raise ValueError("a defect") from KeyError("cause")

    with pytest.raises(ValueError, match="a defect") as caught:
        fail()
    assert isinstance(caught.value.__cause__, KeyError)
