"""The table of evaluations in the report."""

import json
import re
from pathlib import Path

from offbeat.dashboard.evaluations import evaluations_html, figures_of
from offbeat.dashboard.run_files import RunFiles, read_run


def run_of(folder: Path, *rows: dict[str, object]) -> RunFiles:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(folder)


def test_figures_have_their_intervals_and_ends_and_failures_are_no_figures(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        {"global_step": 0, "eval/accuracy": 0.25, "eval/accuracy_low": 0.125, "eval/accuracy_high": 0.5, "eval/failed_prompts": 3},
        {"global_step": 1, "reward/mean": 1.0},
        {"global_step": 2, "eval/accuracy": 0.5, "eval/hard/pass_at_4": 0.75, "eval/hard/failed_prompts": 0, "eval/dose_low": 7})
    accuracy, hard, dose = figures_of(run)
    assert (accuracy.name, accuracy.values, accuracy.ends) == ("accuracy", {0: 0.25, 2: 0.5}, {0: (0.125, 0.5)})
    assert (hard.name, hard.values, dose.name) == ("hard/pass_at_4", {2: 0.75}, "dose_low")
    assert (accuracy.at(0), accuracy.at(2)) == ("0.25 (0.125 to 0.5)", "0.5")


def test_the_table_has_the_first_the_highest_and_the_last_value_of_each(tmp_path: Path) -> None:
    found = ((0, 0.25, 0.5), (10, 0.75, 0.625), (20, 0.5, 0.625))
    page = evaluations_html(run_of(tmp_path, *(
        {"global_step": step, "eval/accuracy": value, "eval/hard/pass_at_4": other} for step, value, other in found)))
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert rows[1:] == [
        ["accuracy", "0.25, step 0", "0.75, step 10", "0.5, step 20"],
        ["hard: pass@4", "0.5, step 0", "0.625, step 10", "0.625, step 20"]]


def test_a_run_that_measured_one_figure_has_no_table_and_names_cannot_become_markup(tmp_path: Path) -> None:
    assert evaluations_html(run_of(tmp_path, {"global_step": 0, "eval/accuracy": 0.5})) == ""
    page = evaluations_html(run_of(tmp_path, {"global_step": 0, "eval/<script>": 0.5, "eval/accuracy": 0.5}))
    assert "<script>" not in page and "&lt;script&gt;" in page
