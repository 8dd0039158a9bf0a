"""The page of commands is what the parsers say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_of_commands_is_what_the_parsers_say():
    page = runpy.run_path(str(ROOT / "tools" / "commands_page.py"))["render"]()
    written = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert written == page, "docs/commands.md is stale: python tools/commands_page.py > docs/commands.md"
    assert all(f"## `offbeat {command}`\n\n{start}" in page for command, start in (("train", "Train"), ("report", "Write RUN_DIR")))
    assert "/" + "tmp" not in page
