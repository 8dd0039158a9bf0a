"""Rollouts in the report."""

from pathlib import Path

from offbeat.dashboard.report import write_report
from offbeat.dashboard.samples import choose_samples, samples_html
from offbeat.data.kept import read_rollouts
from rollout_samples import group, trajectory, write_rollouts, write_small_run


def chosen(run_dir: Path, *groups: dict) -> list[tuple[str, str]]:
    write_rollouts(run_dir, 1, groups)
    return [(name, t.completion) for name, _, t in choose_samples(list(read_rollouts(run_dir)))]


def test_the_best_the_worst_the_longest_and_one_left_out_are_chosen(tmp_path: Path) -> None:
    left_out = trajectory("q", "lost", None, reason="too long: 9 tokens", trained=False)
    assert chosen(tmp_path, group("p", ("good", 1.0), ("bad", -1.0)), group("q", ("a long answer", 0.5), left_out)) == [
        ("highest reward", "good"), ("lowest reward", "bad"), ("longest", "a long answer"), ("left out", "lost")]


def test_none_is_shown_twice(tmp_path: Path) -> None:
    assert chosen(tmp_path, group("p", ("good and long", 1.0), ("bad", 0.0))) == [
        ("highest reward", "good and long"), ("lowest reward", "bad")]
    assert chosen(tmp_path, group("p", ("same", 1.0), ("same", 1.0))) == [("highest reward", "same")]
    assert chosen(tmp_path) == []


def test_the_report_shows_rollouts_of_the_newest_step_as_text(tmp_path: Path) -> None:
    write_small_run(tmp_path)
    page = write_report(tmp_path).read_text()
    section = page.partition("<h2>Rollouts of step 3</h2>")[2].partition("<h2>")[0]
    assert "Name a fruit. " in section and "&lt;script&gt;alert(1)&lt;/script&gt;" in section and "<script>alert" not in page
    assert "reward 2" in section and "advantage +1.5" in section and "Banana" in section


def test_a_long_text_is_cut_and_a_damaged_file_costs_nothing_but_the_section(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 1, [group("p", ("word " * 5000, 1.0))])
    groups = list(read_rollouts(tmp_path))
    assert len(samples_html(groups)) < 3000 and samples_html([]) == ""
    (tmp_path / "rollouts" / "step-000001.jsonl.zst").write_bytes(b"rubbish")
    assert "Rollouts of step" not in write_report(tmp_path).read_text()
