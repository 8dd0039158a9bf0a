"""Relative paths of a configuration file are of the working directory, or else of the file's folder."""

from pathlib import Path

import pytest

from offbeat.config.load import load_config
from offbeat.config.relative_paths import found_beside

TASK = """
[model]
path = "small"
[data]
path = "data/*.jsonl"
heldout_path = "elsewhere.jsonl"
chat_template = "chat.jinja"
[rollout]
workflow = "play.py:play"
should_accept = "offbeat.rollout.rewards.math:math"
[rollout.rewards]
"rewards.py:right" = 1.0
math = 0.5
[run]
dir = "runs"
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my-task"
    (folder / "small").mkdir(parents=True)
    (folder / "data").mkdir()
    for name in ("data/one.jsonl", "chat.jinja", "play.py", "rewards.py", "tools.py", "runs"):
        (folder / name).write_text("{{ messages }}")
    (folder / "task.toml").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return folder


def test_what_lies_beside_the_file_is_found_from_anywhere(task: Path) -> None:
    config = load_config("my-task/task.toml")
    assert config.model.path == "my-task/small" and config.data.path == "my-task/data/*.jsonl"
    assert config.data.chat_template == "{{ messages }}"
    assert config.rollout.workflow == "my-task/play.py:play"
    assert config.rollout.rewards == {"my-task/rewards.py:right": 1.0, "math": 0.5}
    tools = found_beside({"agent": {"tools": ["tools.py:look", "calculator"]}}, Path("my-task"))
    assert tools == {"agent": {"tools": ["my-task/tools.py:look", "calculator"]}}
    # What is not there, what is no path, and where a run writes stay as they are.
    assert config.data.heldout_path == "elsewhere.jsonl" and config.run.dir == "runs"
    assert config.rollout.should_accept == "offbeat.rollout.rewards.math:math"


def test_the_working_directory_comes_first_and_the_command_line_is_of_it(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (task.parent / "play.py").write_text("")
    config = load_config("my-task/task.toml", [("model.path", "small")])
    assert config.rollout.workflow == "play.py:play" and config.model.path == "small"
    monkeypatch.chdir(task)
    assert load_config("task.toml").model.path == "small"
