"""Functions given as objects: named where they can be imported, sent by value where they cannot, and never read from a file."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.data import wire
from offbeat.data.identity import code_digest
from offbeat.data.row import Row
from offbeat.errors import CodeError
from offbeat.user_code import given
from offbeat.user_code.functions import resolve
from offbeat.user_code.given import Given, find_given, give, import_name, pack, receive, source_of, withdraw
from support import rewards

ROW = Row("2+2=", "4")


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    withdraw(list(given._TIMES.elements()))


def in_a_child(given: tuple[Given, ...], call: str) -> str:
    """What a process prints that receives the functions, and then runs `call`."""
    code = (
        "import sys; from offbeat.data import wire; from offbeat.user_code.given import Given, receive, find_given\n"
        "receive(wire.decode(tuple[Given, ...], sys.stdin.buffer.read()))\n" + call)
    done = subprocess.run([sys.executable, "-c", code], input=wire.encode(given), capture_output=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_a_function_of_a_module_is_named_so_that_a_command_finds_it() -> None:
    assert import_name(rewards.right) == "support.rewards:right"
    assert import_name(Path) == "pathlib:Path"
    name = give(rewards.equal, kind="rollout.reward")
    assert resolve(name, kind="reward") is rewards.equal
    withdraw([name])
    assert resolve(name, kind="reward")("4", ROW) == 1.0


def test_what_cannot_be_imported_is_kept_under_a_name_that_says_so() -> None:
    def reward(completion: str, row: Row) -> float:
        return float(completion == row.answer)

    first, second = give(reward, kind="rollout.reward"), give(lambda completion, row: 2.0, kind="rollout.reward")
    assert (first, second) == ("python:reward", "python:lambda")
    assert find_given(first) is reward and "completion == row.answer" in source_of(first)
    other = give(type("reward", (), {"__call__": lambda self, completion, row: 3.0})(), kind="rollout.reward")
    assert other == "python:reward_2" and give(reward, kind="rollout.reward") == first
    assert code_digest(first) and code_digest(first) != code_digest(second)
    withdraw([first])
    assert find_given(first) is reward, "it was given twice"
    withdraw([first])
    with pytest.raises(CodeError, match="'python:reward' is a function that a Python program gave to its run"):
        resolve(first, kind="reward")


def test_a_child_process_gets_what_the_function_refers_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_script.py").write_text("def doubled(x): return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import beside_the_script  # noqa: PLC0415 # type: ignore[import-not-found]

    scale = 1.25

    def reward(completion: str, row: Row) -> float:
        return beside_the_script.doubled(scale) * len(completion)

    name = give(reward, kind="rollout.reward")
    assert pack([name, "math:sqrt"])[0].name == name and len(pack([name, "math:sqrt"])) == 1
    assert in_a_child(pack([name]), f"print(find_given({name!r})('four', None))") == "10.0\n"
    imported = give(beside_the_script.doubled, kind="rollout.reward")
    assert imported == f"{tmp_path}/beside_the_script.py:doubled"
    shown = f"print(find_given({imported!r})(4), find_given({imported!r}).__module__)"
    assert in_a_child(pack([imported]), shown) == "8 beside_the_script\n"


def test_what_cannot_be_sent_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    def reward(completion: str, row: Row) -> float:
        with lock:
            return 1.0

    with pytest.raises(CodeError, match="rollout.reward: 'reward' cannot be sent to the process that calls it .*_thread.lock"):
        give(reward, kind="rollout.reward")
    with pytest.raises(CodeError, match="rollout.reward must be a function, or text that names one, such as .*, got 3 "):
        give(3, kind="rollout.reward")
    large = "x" * 5000
    monkeypatch.setattr(given, "_MOST_BYTES", 4000)
    with pytest.raises(CodeError, match="'lambda' refers to 0 MiB of data"):
        give(lambda completion, row: len(large), kind="rollout.reward")


def test_what_a_child_cannot_load_is_blamed_on_the_function() -> None:
    with pytest.raises(CodeError, match="'python:reward' cannot be loaded in a process of its own: ModuleNotFoundError: .*'gone'"):
        receive([Given("python:reward", b"cgone\nreward\n.", ())])
