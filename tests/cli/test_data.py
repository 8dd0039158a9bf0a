"""`offbeat data`."""

import json
import os
from pathlib import Path

import pytest

from offbeat.cli.main import main
from offbeat.data.image_store import FIRST_ID
from small_run import build_small_model

ROWS = [{"prompt": "1+2=", "answer": "3", "level": "easy"}, {"prompt": "(2)+2=", "answer": "4"}, {"prompt": "3+2="}]


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run.toml"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    path.write_text(
        f'[run]\ndir = "{tmp_path}"\n[data]\npath = "{rows}"\nheldout_size = 0\n[rollout]\nmax_new_tokens = 4\n'
        f'[model]\npath = "{build_small_model(tmp_path / "model", seed=0)}"\n')

    def call(*arguments: str, code: int = 0) -> list[str]:
        assert main(["data", "show", str(path), *arguments]) == code
        captured = capsys.readouterr()
        return (captured.err if code else captured.out).replace(str(rows), "rows.jsonl").splitlines()

    return call


def test_prompts_are_shown_with_what_is_wrong_with_the_others(show) -> None:
    assert show("-n", "1") == [
        "── 'rows.jsonl', line 1 · 4 tokens ──", "1+2=", "answer, for rewards: 3", "columns, for rewards: level", "",
        "prompts: 2 rows to train on, 0 held out", "tokens of a row: 4 to 6, mean 5.0, in the first 2 rows",
        "rows that cannot be used: 1, allowed are data.max_unusable_rows = 0",
        "  'rows.jsonl', line 3, has no field 'answer'; it has prompt; set data.answer_field or data.format; an answer is needed"
        " where it is imitated (run.warm_up, offbeat sft), shown to a teacher, or compared with by exact_match or math"]


def test_what_the_tiny_model_does_not_know_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, path = tmp_path / "rows.jsonl", tmp_path / "run.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}"\nwarm_up = true\n[data]\npath = "{rows}"\nheldout_size = 0\n')
    rows.write_text("".join(json.dumps({"prompt": "today?", "answer": answer}) + "\n" for answer in ("sunday", "Monday")))
    assert main(["data", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "prompts: 1 rows to train on" in shown and "all rows can be used" not in shown and "<unk>" not in shown
    assert f"'{rows}', line 2: 'M' in its answer is not in the alphabet of the tiny model: digits, lower-case letters" in shown
    assert main(["data", "show", str(path), "--run.warm_up", "false", "--rollout.reward", "mine.py:score"]) == 0
    *_, usable, warned = capsys.readouterr().out.splitlines()
    assert usable == "all rows can be used" and warned.startswith("1 of the first 2 rows have an answer that the model can never write")
    rows.write_text('{"prompt": "Today?", "answer": "sunday"}\n')
    assert main(["data", "show", str(path)]) == 2
    assert "no rows that can be used; the first: " in capsys.readouterr().err


def test_what_is_trained_on_is_marked_where_there_are_no_colours(show) -> None:
    shown = show("--as", "sft", "-n", "2")
    assert shown[:5] == [
        "── 'rows.jsonl', line 1 · 6 tokens, 2 of them trained on ──", "1+2=⟦3<eos>⟧", "",
        "── 'rows.jsonl', line 2 · 8 tokens, 2 of them trained on ──", "(2)+2=⟦4<eos>⟧"]


def test_colours_take_the_place_of_marks_in_a_terminal(show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = "\n".join(show("--as", "sft", "-n", "1"))
    assert "1+2=\x1b[32m3<eos>\x1b[0m" in text and "⟦" not in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "⟦3<eos>⟧" in "\n".join(show("--as", "sft", "-n", "1"))


def test_json_has_a_line_for_each_row_and_one_for_all(show) -> None:
    row, all_rows = map(json.loads, show("--json", "-n", "1"))
    assert row["texts"][0]["pieces"] == [["1+2=", False]]
    assert (all_rows["kind"], all_rows["num_rows"], len(all_rows["unusable"])) == ("rl", 2, 1)


def test_a_wrong_number_of_rows_and_missing_data_are_one_sentence(show) -> None:
    assert show("-n", "-1", code=2) == ["offbeat: -n must be at least 0, got -1"]
    [line] = show("--data.path", "none.jsonl", code=2)
    assert line.startswith("offbeat: data file 'none.jsonl' does not exist; give ")
    assert line.endswith("; a path is relative to the working directory")


def test_stored_images_of_runs_that_are_gone_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ".images"
    folder.mkdir()
    for name in ("gone", "stays"):
        (folder / f"{name}.run").write_text(f"{FIRST_ID + len(name)}\n")
        (folder / f"{FIRST_ID + len(name)}.image").write_bytes(bytes(2_000_000))
        os.utime(folder / f"{name}.run", (0, 0))
    (tmp_path / "stays").mkdir()
    assert main(["data", "prune", "--run.dir", str(tmp_path)]) == 0
    removed, kept = capsys.readouterr().out.splitlines()
    assert removed == f"{folder}: images removed: 1, 2.0 MB; runs gone: gone"
    assert kept == "images kept: 1"
    assert main(["data", "prune", "--run.dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": [], "num_removed": 0, "removed_bytes": 0, "num_kept": 1, "num_unknown": 0}
