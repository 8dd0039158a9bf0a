"""Agents that are commands: environment, reward, output, and the end of all that they have started."""

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from offbeat.agents.command import CommandPlayer
from offbeat.agents.task import AgentTask, Played
from offbeat.data.row import Row
from offbeat.errors import CodeError, DeadlineError
from scripted_model import play_agent
from waiting import wait_until

ASK = """
import json, os, urllib.request
row = json.loads(os.environ["OFFBEAT_ROW"])
body = json.dumps({"model": os.environ["OFFBEAT_MODEL"], "messages": [{"role": "user", "content": row["prompt"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def run(code: str, *, timeout_s: float = 60, row: Row = Row("p", "a", {"x": "1"}), **options) -> Played:  # noqa: B008 - frozen
    task = AgentTask(row, "http://x/v1", "http://x", "key", "policy", 3, timeout_s)

    async def main() -> Played:
        options_ = {"num_episodes": 2, "log_dir": None} | options
        async with CommandPlayer([sys.executable, "-S", "-c", code], **options_) as player:
            return await player.play(task)

    return asyncio.run(main())


def test_a_command_finds_what_it_needs_in_its_environment_and_prints_its_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    code = "import json, os; print('a line'); print(json.dumps({'reward': {'right': 1, 'form': 0.5}, 'note': 'x'}))"
    assert run(code).parts == {"right": 1.0, "form": 0.5}
    assert run("import json, os; print(float(json.loads(os.environ['OFFBEAT_ROW'])['x']) + ('SOME_TOKEN' in os.environ))").reward == 1.0
    assert run("print('no number')").outcome is None


def test_a_row_of_any_size_is_in_a_file() -> None:
    code = (
        "import json, os; row = json.load(open(os.environ['OFFBEAT_ROW_FILE']));"
        "print(len(row['prompt']) + ('OFFBEAT_ROW' in os.environ))")
    assert run(code, row=Row("p" * 300_000, "a")).reward == 300_000
    assert run(code, row=Row("p", "a")).reward == 2


def test_a_command_that_fails_says_so_with_what_it_wrote() -> None:
    with pytest.raises(CodeError, match=r"ended with code 1: .*ValueError: no idea"):
        run("raise ValueError('no idea')")
    with pytest.raises(CodeError, match="MemoryError"):
        run("bytearray(1 << 30)", memory_bytes=256 << 20)


def test_what_a_command_has_started_ends_with_it_also_when_it_is_given_up(tmp_path: Path) -> None:
    start = (
        "import subprocess, sys, time;"
        "print(subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(99)']).pid, flush=True);")
    child = int(run(start).reward or 0)
    wait_until(lambda: not psutil.pid_exists(child), timeout_s=10)
    with pytest.raises(DeadlineError):
        run(start + "time.sleep(99)", timeout_s=1.5, log_dir=tmp_path)
    log = (tmp_path / "agent.log").read_text().split("\n")
    assert log[0] == "-- gave up"
    wait_until(lambda: not psutil.pid_exists(int(log[1])), timeout_s=10)


def test_only_the_end_of_much_output_is_kept(tmp_path: Path) -> None:
    assert run("print('x' * 10_000_000); print(2.5)", log_dir=tmp_path).reward == 2.5
    assert (tmp_path / "agent.log").stat().st_size < 100_000


def test_a_command_plays_an_episode_through_the_proxy(tmp_path: Path) -> None:
    code = tmp_path / "agent.py"
    code.write_text(ASK)
    trajectories, model = play_agent(
        Row("hi", ""), command=[sys.executable, "-S", str(code)], say=lambda _: "hello there", log_dir=tmp_path)
    assert len(model.calls) == 2 and [t.reward for t in trajectories] == [float(len("hello there"))] * 2
    assert "hello there" in (tmp_path / "agent.log").read_text()


def test_a_process_that_has_left_the_group_is_not_waited_for() -> None:
    leave = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(5)'], start_new_session=True);"
    assert run(leave + "print(0.5)", timeout_s=4).reward == 0.5


def test_a_proxy_of_the_network_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "example.org")
    assert run("import os; print(float(os.environ['NO_PROXY'] == os.environ['no_proxy'] == 'example.org,127.0.0.1,localhost'))").reward == 1
