"""What the tutorial has its readers write down works: its data, rewards and configurations."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from offbeat.config.load import load_config
from offbeat.data.row import Row
from offbeat.user_code.functions import resolve

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")
TASKS = {"reverse": "words.jsonl", "numbers": "rows.jsonl"}
"""Folders of the two tasks, and the files that their first script writes."""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all files that the page shows, written there as a reader would."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(python|toml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names = ("make_rows.py", "reward.py", "task.toml")
    assert [language for language, _ in blocks] == ["python", "python", "toml"] * len(TASKS)
    for number, (_, text) in enumerate(blocks):
        path = Path(list(TASKS)[number // 3], names[number % 3])
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("task", TASKS)
def test_the_files_of_the_page_make_data_and_a_valid_configuration(written: Path, task: str) -> None:
    exec((written / task / "make_rows.py").read_text(), {})
    rows = [json.loads(line) for line in (written / task / TASKS[task]).read_text().splitlines()]
    config = load_config(f"{task}/task.toml", [])
    assert config.run.total_steps == tomllib.loads((written / task / "task.toml").read_text())["run"]["total_steps"]
    assert Path(config.data.path) == Path(task, TASKS[task])
    reward = resolve(config.rollout.reward, kind="reward")
    row = Row(prompt=rows[0]["prompt"], answer=rows[0]["answer"])
    assert reward(row.answer, row) == 1.0
    assert 0 <= reward(f"It is {row.answer}.", row) < 1


def test_the_first_rows_are_those_that_the_page_shows(written: Path) -> None:
    exec((written / "reverse" / "make_rows.py").read_text(), {})
    first = (written / "reverse" / "words.jsonl").read_text().splitlines()[:2]
    assert "\n".join(first) in PAGE
