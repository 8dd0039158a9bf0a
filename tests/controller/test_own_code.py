"""The check of a user's own objective and credit, from a process without torch; and the examples in the documentation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.config.load import load_config
from offbeat.controller import own_code
from offbeat.controller.own_code import check_own_code
from offbeat.errors import CodeError

SUPPORT = Path(__file__).parents[1] / "support"
LOSS, CREDIT = f"{SUPPORT / 'own_losses.py'}:", f"{SUPPORT / 'own_credits.py'}:"


def check(**settings):
    return check_own_code(load_config(None, [(f"algorithm.{name}", value) for name, value in settings.items()]).algorithm)


def test_settings_without_own_code_start_no_process() -> None:
    assert check(preset="cispo") == []


def test_an_objective_is_tried_out_in_a_child_process_and_its_faults_come_back() -> None:
    assert check(objective=f"{LOSS}geometric") == [
        f"algorithm.objective = '{LOSS}geometric' gives finite losses with gradients for made-up tokens"]
    with pytest.raises(CodeError, match=r"algorithm.objective = '.*:without_gradient' has no gradient"):
        check(objective=f"{LOSS}without_gradient")


def test_the_controller_stays_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from offbeat.config.load import load_config; from offbeat.controller.own_code import check_own_code\n"
        f"config = load_config(None, [('algorithm.objective', '{LOSS}geometric'), ('algorithm.credit', '{CREDIT}centred')])\n"
        "print(len(check_own_code(config.algorithm)), 'torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.stdout.split() == ["2", "False"], done.stderr


def test_the_examples_in_the_documentation_work(tmp_path: Path, monkeypatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^`(my_\w+\.py)`.*?\n```python\n(.*?)```", page, re.DOTALL | re.MULTILINE))
    for name, source in files.items():
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^offbeat config check task.toml (.*my_.*)$", page, re.MULTILINE)
    assert sorted(files) == ["my_credit.py", "my_loss.py"] and len(commands) == 2
    for words in commands:
        (_, name), (_, constants) = re.findall(r"--algorithm\.(objective|credit|constants) ('.*?'|\S+)", words)
        setting = "objective" if "my_loss" in name else "credit"
        assert len(check(**{setting: name, "constants": constants.strip("'")})) == 1


def test_a_credit_that_never_returns_ends_the_step_and_not_the_process_with_it() -> None:
    code = (
        "import asyncio, threading\nfrom offbeat.controller.own_code import with_credit\n"
        "asyncio.run(with_credit(threading.Event().wait, credit='mine.py:stuck', step=7, timeout_s=0.05))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "OwnCodeError: credit 'mine.py:stuck' has not returned after 0.05 s, in step 7; see whether it can wait" in done.stderr


def test_a_credit_that_never_returns_is_found_when_it_is_tried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("import threading\ndef stuck(groups, constants): threading.Event().wait()\n")
    monkeypatch.setattr(own_code, "_TIMEOUT_S", 0.05)
    with pytest.raises(CodeError, match=r"mine.py:stuck' has not returned after 0.05 s, when it was tried out on made-up samples"):
        check_own_code(load_config(None, [("algorithm.credit", f"{tmp_path}/mine.py:stuck")]).algorithm)
