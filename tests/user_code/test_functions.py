"""Dotted names of user code: what resolves, and one clear sentence for everything that does not."""

import functools
import math

import pytest

from offbeat.errors import CodeError, OwnCodeError
from offbeat.rollout.rewards.exact_match import exact_match
from offbeat.user_code.functions import at_step, blaming, check_takes, resolve

SOURCE = """
import dataclasses
calls = []

@dataclasses.dataclass
class Seen:
    text: str

def reward(completion, row):
    calls.append(Seen(completion))
    return 1.0

def count():
    return len(calls)
"""


def test_a_module_function_resolves():
    assert resolve("offbeat.rollout.rewards.exact_match:exact_match", kind="reward") is exact_match
    assert resolve("math:sqrt", kind="reward") is math.sqrt


def test_functions_of_a_file_share_its_state(tmp_path, monkeypatch):
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    resolve(f"{path}:reward", kind="reward")("hi", None)
    monkeypatch.chdir(tmp_path)
    assert resolve("my_rewards.py:count", kind="workflow")() == 1


@pytest.mark.parametrize(("dotted", "sentence"), [
    ("", "reward must be 'module:function' or 'path/to/file.py:function', got ''"),
    ("math.sqrt", "got 'math.sqrt'"),
    ("math:", "got 'math:'"),
    ("math:a b", "got 'math:a b'"),
    ("math:sqroot", "'math' has no function 'sqroot'; did you mean 'sqrt'?"),
    ("offbeat.rollout.rewards.exact_match:zzz", "has no function 'zzz'; it has exact_match"),
    ("math:pi", "must be a function, got a float"),
    ("offbeat.rollout.rewards.exakt:f", "module 'offbeat.rollout.rewards.exakt' was not found; check the spelling, install it, or"),
    ("no_such_package.rewards:f", "module 'no_such_package.rewards' was not found"),
    ("no/such/file.py:f", "there is no file"),
])
def test_a_name_that_does_not_resolve_says_why(dotted, sentence):
    with pytest.raises(CodeError) as caught:
        resolve(dotted, kind="reward")
    assert str(caught.value).startswith("reward")
    assert sentence in str(caught.value)


def test_a_file_that_fails_on_import_says_how_and_can_be_mended(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("1 / 0")
    with pytest.raises(CodeError, match="failed on import: ZeroDivisionError: division by zero"):
        resolve(f"{path}:f", kind="reward")
    path.write_text("import sys; sys.exit('no key')")
    with pytest.raises(CodeError, match="failed on import: SystemExit: no key"):
        resolve(f"{path}:f", kind="reward")
    path.write_text("def f(): return 3")
    assert resolve(f"{path}:f", kind="reward")() == 3


def test_a_module_whose_own_import_is_missing_names_that(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import not_there_at_all")
    (tmp_path / "breaks.py").write_text("raise OSError('no key')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CodeError, match="module 'needs_more' needs the module 'not_there_at_all', which is not installed"):
        resolve("needs_more:f", kind="reward")
    with pytest.raises(CodeError, match="module 'breaks' failed on import: OSError: no key"):
        resolve("breaks:f", kind="reward")


def test_what_a_users_function_raises_is_told_with_its_own_line_and_the_step(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import json\n\ndef f(text):\n    return json.loads(text)\n")
    function = resolve(f"{path}:f", kind="credit")
    with pytest.raises(OwnCodeError) as caught, at_step(7), blaming("mine.py:f", function, kind="credit"):
        function("{")
    assert str(caught.value).startswith("credit 'mine.py:f' raised JSONDecodeError: ")
    assert str(caught.value).endswith(f" at {path}, line 4, in step 7")


def test_a_function_that_calls_sys_exit_is_told_as_one_that_raised(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import sys\n\ndef f():\n    sys.exit(0)\n")
    function = resolve(f"{path}:f", kind="credit")
    with pytest.raises(OwnCodeError, match=r"credit 'mine\.py:f' raised SystemExit: 0 at .*mine\.py, line 4$"), blaming(
            "mine.py:f", function, kind="credit"):
        function()


def test_a_builtin_has_no_line_of_its_own_so_that_of_the_call_is_told():
    with pytest.raises(OwnCodeError, match=r"raised ValueError: .* at .*test_functions.py, line \d+$"), blaming(
            "math:sqrt", math.sqrt, kind="credit"):
        math.sqrt(-1)


def test_arguments_are_those_of_what_is_called_and_not_of_what_it_wraps():
    def scaled(completion, row, scale):
        return scale * len(completion)

    @functools.wraps(scaled)
    def wrapped(completion, row):
        return scaled(completion, row, 2)

    check_takes(wrapped, "mine.py:wrapped", ("completion", "row"), kind="reward")
    check_takes(functools.partial(scaled, scale=2), "mine.py:partial", ("completion", "row"), kind="reward")
    with pytest.raises(CodeError, match=r"takes \(completion, row, scale\), but it is called with \(completion, row\); missing a required"):
        check_takes(scaled, "mine.py:scaled", ("completion", "row"), kind="reward")
