"""The embedded engine asked by unmodified SDKs and agents: strict types of answers, and structured outputs."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.test_chats import CALL, THOUGHT, write_model
from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer

REPOSITORY, HERE = Path(__file__).parents[2], Path(__file__).parent


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EngineServer(EngineOptions(model=write_model(tmp_path_factory.mktemp("thinks"), {"\n": THOUGHT})))
    yield server.start()
    server.stop()


def run(program: str, url: str) -> list[str]:
    done = subprocess.run(
        [REPOSITORY / ".venv-agents-a/bin/python", HERE / "programs" / program, url], capture_output=True, text=True, check=False,
        timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_answers_pass_the_strict_types_of_both_sdks(url: str) -> None:
    assert len(run("strict_types.py", url)) == 10


def test_streams_with_calls_add_up_to_whole_answers_in_both_sdks(tmp_path: Path) -> None:
    server = EngineServer(EngineOptions(model=write_model(tmp_path, {"\n": THOUGHT, THOUGHT: "x", "x": "y", "y": CALL, CALL: "z"})))
    try:
        told = run("streams.py", server.start())
    finally:
        server.stop()
    assert told == ["chat completions sevenxyz {\"a\": 3} 4", "Responses sevenxyz {\"a\": 3} 4", "Messages sevenxyz {'a': 3} 4"]


def test_agents_of_two_libraries_get_what_their_schemas_say(url: str) -> None:
    told = run("structured_outputs.py", url)
    assert len(told) == 4 and {line.split()[-1] for line in told} <= {"x", "y"}
