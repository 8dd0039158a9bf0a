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
        elif line.startswith("The settings of ["):
            first = line.partition("[")[2].partition("]")[0]
            rows |= {key.replace(first, section): row for key, row in rows.items() if key.startswith(f"{first}.")}
        elif line.startswith("| `"):
            rows[f"{section}.{line.split('`')[1]}"] = line
    assert rows.keys() == {key for key, _ in settings()}
    assert all(row.endswith(". |") for row in rows.values())


def test_settings_that_a_first_run_needs_are_marked():
    page = render_docs()
    assert "| `total_steps` ★ | integer ≥ 1 | `100` |" in page
    assert "| `seed` | integer ≥ 0" in page
    assert "| `lr` ★ |" in page
    assert page.count("`lr` ★ for a first run") == 3, "not of the critic, which a first run does without"


def test_a_table_that_stands_in_several_sections_is_printed_once() -> None:
    page = render_docs()
    assert page.count("| `beta1` |") == 1
    assert "## [sft.optimizer]\n\nThe settings of [train.optimizer], with `warmup_steps = 30` by default; of these `lr` ★ for a" in page


def test_bounds_choices_and_bars_are_written_so_that_a_table_holds_them():
    page = render_docs()
    assert "| `beta1` | number ≥ 0, < 1 | `0.9` |" in page
    assert '`"controller"` or `"spmd"`' in page
    assert "\\|advantage\\|" in page
    assert "| `stop` | list of text | `[]` |" in page
    assert "| `filters` | list of tables | `[]` |" in page
    assert "| `constants` | table | `{}` |" in page
