"""The reference of settings is complete and fresh."""

from pathlib import Path

from offbeat.config.docs import render_docs
from offbeat.config.load import settings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_in_docs_is_what_the_source_says():
    assert PAGE.read_text(encoding="utf-8") == render_docs(), "docs/configuration.md is stale: offbeat config docs > docs/configuration.md"


def test_every_setting_has_a_row_with_a_sentence():
    section, rows = "", {}
    for line in render_docs().splitlines():
        if line.startswith("#") and "[" in line:
            section = line.partition("[")[2].rstrip("]")
        elif line.startswith("| `"):
            rows[f"{section}.{line.split('`')[1]}"] = line
    assert rows.keys() == {key for key, _ in settings()}
    assert all(row.endswith(". |") for row in rows.values())


def test_settings_that_a_first_run_needs_are_marked():
    page = render_docs()
    assert "| `total_steps` ★ | integer ≥ 1 | `100` |" in page
    assert "| `seed` | integer ≥ 0" in page
    assert page.count("| `lr` ★ |") == 4, "not of the critic, which a first run does without"


def test_bounds_choices_and_bars_are_written_so_that_a_table_holds_them():
    page = render_docs()
    assert "| `beta1` | number ≥ 0, < 1 | `0.9` |" in page
    assert '`"controller"` or `"spmd"`' in page
    assert "\\|advantage\\|" in page
    assert "| `stop` | list of text | `[]` |" in page
    assert "| `filters` | list of tables | `[]` |" in page
    assert "| `constants` | table | `{}` |" in page
