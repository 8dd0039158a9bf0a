"""Held-out answers before and after training in the report and on the live page."""

import re
from pathlib import Path

import pytest

from offbeat.dashboard import run_files
from offbeat.dashboard.answers import choose_pairs
from offbeat.dashboard.report import write_report
from offbeat.dashboard.run_files import read_run
from offbeat.data.row import Row
from offbeat.evaluation.files import encode_lines, read_samples
from offbeat.evaluation.samples import EvaluatedPrompt, EvaluatedSample, EvaluatedSet
from offbeat.telemetry.evaluation_log import write_evaluation
from rollout_samples import write_small_run


def evaluated(*rewards: float | None, name: str = "", said: str = "") -> EvaluatedSet:
    """Prompts "p0", "p1", … with one answer each, "said 0" and so on, and its reward."""
    return EvaluatedSet(name, 1, tuple(
        EvaluatedPrompt(Row(f"p{i}", f"{i}"), (EvaluatedSample(f"{said} {i}", reward, "stop" if reward is not None else "reward failed"),))
        for i, reward in enumerate(rewards)))


def store(run_dir: Path, step: int, played: EvaluatedSet) -> None:
    write_evaluation(run_dir, step=step, name=played.name, lines=encode_lines(played))


def test_what_gained_most_what_lost_most_and_what_stayed_are_chosen() -> None:
    first = evaluated(0.0, 0.0, 0.0, 0.0, 1.0, 0.5, 1.0, 0.0, 1.0)
    last = evaluated(0.5, 1.0, 1.0, 1.0, 0.0, 0.2, 1.0, 0.0, 1.0)
    assert [(pair.outcome, pair.prompt.row.prompt) for pair in choose_pairs(first, last)] == [
        ("gained", "p1"), ("gained", "p2"), ("gained", "p3"), ("lost", "p4"), ("still wrong", "p7"), ("right before and after", "p6")]


def test_prompts_are_matched_by_what_they_ask_and_answers_without_a_reward_count_as_0() -> None:
    first, last = evaluated(None, 0.0), evaluated(1.0, 1.0)
    moved = EvaluatedSet("", 1, (last.prompts[1], EvaluatedPrompt(Row("new", "9"), last.prompts[0].samples)))
    assert [pair.prompt.row.prompt for pair in choose_pairs(first, moved)] == ["p1"]
    assert [pair.change for pair in choose_pairs(first, last)] == [1.0, 1.0]


def test_of_equal_changes_the_first_in_the_set_is_chosen() -> None:
    first, last = evaluated(*[0.0] * 4, *[1.0] * 4), evaluated(*[1.0] * 4, *[0.0] * 4)
    assert [pair.prompt.row.prompt for pair in choose_pairs(first, last)] == ["p0", "p1", "p2", "p4"]


def test_a_file_of_answers_is_read_again_only_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small_run(tmp_path)
    store(tmp_path, 0, evaluated(0.0))
    store(tmp_path, 3, evaluated(0.5))
    read: list[str] = []

    def note_read(path: Path, *, most: int) -> dict[str, dict[str, EvaluatedSet]]:
        read.append(path.name)
        return read_samples(path, most=most)

    monkeypatch.setattr(run_files, "read_samples", note_read)
    assert read_run(tmp_path).answers == read_run(tmp_path).answers and len(read) == 2
    store(tmp_path, 3, evaluated(1.0))
    assert read_run(tmp_path).answers[3].prompts[0].samples[0].reward == 1.0
    assert read[2:] == ["step-000003.jsonl.zst"]


def test_the_report_shows_answers_before_the_first_step_and_after_the_last_as_text(tmp_path: Path) -> None:
    write_small_run(tmp_path)
    store(tmp_path, 0, evaluated(0.0, None, said="<b>first"))
    store(tmp_path, 2, evaluated(0.5, None, said="between"))
    assert "before and after" in write_report(tmp_path).read_text()
    store(tmp_path, 3, evaluated(1.0, None, said="last"))
    store(tmp_path, 3, evaluated(1.0, 1.0, name="maths", said="of another set"))
    section = write_report(tmp_path).read_text().partition("<h2>Held-out answers, before and after</h2>")[2].partition("<h2>")[0]
    assert re.findall(r'<div class="(asked|written|given|expected|when)">([^<]*)</div>', section) == [
        ("asked", "p0"), ("when", "before · reward 0"), ("given", "&lt;b&gt;first 0"), ("when", "after step 3 · reward 1"),
        ("written", "last 0"), ("expected", "answer: 0"),
        ("asked", "p1"), ("when", "before · no reward: reward failed"), ("given", "&lt;b&gt;first 1"),
        ("when", "after step 3 · no reward: reward failed"), ("written", "last 1"), ("expected", "answer: 1")]


def test_a_run_of_sets_alone_shows_the_first_of_them(tmp_path: Path) -> None:
    write_small_run(tmp_path)
    for step in (0, 3):
        for name in ("words", "maths"):
            store(tmp_path, step, evaluated(step / 3, name=name, said=name))
    page = write_report(tmp_path).read_text()
    assert "<h2>Answers to maths, before and after</h2>" in page and "words 0" not in page


def test_one_evaluation_or_a_damaged_file_shows_none(tmp_path: Path) -> None:
    write_small_run(tmp_path)
    store(tmp_path, 0, evaluated(0.0))
    assert read_run(tmp_path).answers == {}
    store(tmp_path, 3, evaluated(1.0))
    assert set(read_run(tmp_path).answers) == {0, 3}
    (tmp_path / "evaluations" / "step-000003.jsonl.zst").write_bytes(b"rubbish")
    assert read_run(tmp_path).answers == {} and "before and after" not in write_report(tmp_path).read_text()
