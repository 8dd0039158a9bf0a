"""Where the user's own code raised, and its traceback once for each kind."""

import json
from pathlib import Path

import cloudpickle
import pytest

from offbeat.errors import CodeError
from offbeat.raised import FirstTracebacks, describe_at, place_of
from offbeat.user_code.functions import resolve

CODE = """import json

def helper(text):
    return json.loads(text)

def f(text):
    return helper(text) if text else 1 / 0
"""


def raised(path: Path, text: str) -> Exception:
    path.write_text(CODE)
    with pytest.raises(Exception) as caught:
        resolve(f"{path}:f", kind="reward")(text)
    return caught.value


def test_the_innermost_line_of_the_users_own_is_told_as_a_path_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.py"
    assert place_of(raised(path, "{")) == f"{path}, line 4", "json is not the user's own"
    monkeypatch.chdir(tmp_path)
    assert describe_at(raised(path, "")) == "ZeroDivisionError: division by zero at mine.py, line 7"


def test_code_that_is_made_at_run_time_is_told_by_the_line_that_runs_it(tmp_path: Path) -> None:
    path = tmp_path / "sums.py"
    path.write_text("def f(text):\n    return eval(text)\n")
    with pytest.raises(ZeroDivisionError) as caught:
        resolve(f"{path}:f", kind="reward")("1 / 0")
    assert place_of(caught.value) == f"{path}, line 2"


@pytest.mark.parametrize(("file", "place"), [
    ("/tmp/ipykernel_99/123.py", "a cell of the notebook, line 2"), ("<ipython-input-3-ab>", "a cell of the notebook, line 2"),
    ("/home/me/offbeat/train.py", "/home/me/offbeat/train.py, line 2"), ("/x/site-packages/trl/a.py", ""), ("<frozen os>", "")])
def test_a_function_that_was_sent_has_the_line_of_where_it_was_written(file: str, place: str) -> None:
    space: dict = {"__name__": "__main__"}
    exec(compile("def f():\n    return 1 / 0\n", file, "exec"), space)
    function = cloudpickle.loads(cloudpickle.dumps(space["f"]))
    try:
        function()
    except ZeroDivisionError as exc:
        exc.__traceback__ = exc.__traceback__.tb_next if exc.__traceback__ else None  # without this test's own frame
        assert place_of(exc) == place


def test_an_error_without_a_line_of_the_users_own_has_none_and_that_of_its_cause_counts() -> None:
    assert place_of(ValueError("never raised")) == ""
    try:
        json.loads("{")
    except ValueError as exc:
        error = CodeError("it failed")
        error.__cause__ = exc
        assert "test_raised.py, line " in place_of(error)
        exc.__cause__ = exc
        assert "test_raised.py, line " in describe_at(exc)


def test_a_module_that_fails_on_import_says_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import json\n\nTABLE = json.loads('{')\n")
    with pytest.raises(CodeError, match=rf"failed on import: JSONDecodeError: .* at {path}, line 3$"):
        resolve(f"{path}:f", kind="reward")


def test_a_traceback_is_given_once_for_each_class_and_line(tmp_path: Path) -> None:
    first = FirstTracebacks()
    told = first.take(raised(tmp_path / "mine.py", "{"))
    assert "line 4, in helper" in told and told.splitlines()[-1].startswith("json.decoder.JSONDecodeError: Expecting")
    assert first.take(raised(tmp_path / "mine.py", "[")) == ""
    assert "ZeroDivisionError" in first.take(raised(tmp_path / "mine.py", ""))
    assert len(first.take(KeyError("x" * 10**6))) <= 20_000
    assert "\\ud800" in first.take(ValueError("\ud800"))
