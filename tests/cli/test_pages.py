"""`offbeat docs`."""

import re
from pathlib import Path

import pytest

from offbeat.cli.main import main
from offbeat.cli.pages import find_pages

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "offbeat").rglob("*.py"))


def test_pages_are_listed_with_their_titles_and_printed_by_name_or_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"index +Offbeat", listed[0]) and len(listed) == len(list((ROOT / "docs").glob("*.md")))
    for name in ("debugging", "debugging.md", "docs/debugging.md"):
        assert main(["docs", name]) == 0
        assert capsys.readouterr().out == (ROOT / "docs" / "debugging.md").read_text()


def test_an_unknown_page_and_settings_are_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "debuging"]) == 2
    assert capsys.readouterr().err == "offbeat: 'debuging' is not a page; did you mean debugging?\n"
    assert main(["docs", "debugging", "--run.name", "x"]) == 2
    assert "takes no settings, got --run.name" in capsys.readouterr().err


def test_every_page_that_a_text_tells_users_to_read_exists() -> None:
    named = {name for path in SOURCES for name in re.findall(r"`offbeat docs ([a-z-]+)`", path.read_text())}
    assert {"algorithms", "debugging", "engines"} <= named <= set(find_pages())
