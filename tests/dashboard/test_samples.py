"""Rollouts in the report."""

import re
from pathlib import Path

from offbeat.dashboard.report import STYLE, write_report
from offbeat.dashboard.samples import answer_card, choose_samples, played_html, samples_html
from offbeat.data.stored_rollouts import read_rollouts
from rollout_samples import group, trajectory, write_rollouts, write_small_run


def chosen(run_dir: Path, *groups: dict) -> list[tuple[str, str]]:
    write_rollouts(run_dir, 1, groups)
    return [(name, t.completion) for name, _, t in choose_samples(list(read_rollouts(run_dir)))]


def test_the_best_the_worst_the_longest_and_one_left_out_are_chosen(tmp_path: Path) -> None:
    left_out = trajectory("q", "lost", None, reason="too long: 9 tokens", trained=False)
    assert chosen(tmp_path, group("p", ("good", 1.0), ("bad", -1.0)), group("q", ("a long answer", 0.5), left_out)) == [
        ("best", "good"), ("worst", "bad"), ("longest", "a long answer"), ("left out", "lost")]


def test_up_to_three_of_the_best_and_of_the_worst_take_turns_and_come_from_other_prompts(tmp_path: Path) -> None:
    groups = [
        group(f"p{i}", (f"good {i}", 2 - i / 10), (f"good, too {i}", 2 - i / 10), (f"bad {i}", i / 10), index=i) for i in range(5)]
    middle = group("p", ("a long answer in the middle", 1.0), index=9)
    assert chosen(tmp_path, *groups, middle) == [
        ("best", "good 0"), ("worst", "bad 0"), ("another of the best", "good 1"), ("another of the worst", "bad 1"),
        ("another of the best", "good 2"), ("another of the worst", "bad 2"), ("longest", "a long answer in the middle")]
    of_one = [group("p", ("right", 1.0)), group("q", ("wrong", 0.0), index=1), group("r", ("as wrong", 0.0), index=2)]
    assert [name for name, _ in chosen(tmp_path, *of_one)] == ["best", "worst", "another of the worst"]


def test_a_rollout_of_several_turns_is_shown_with_what_it_was_answered_and_the_answer_that_was_asked_for(tmp_path: Path) -> None:
    tokens = list("ask>call|tool says 5|it is 5")
    written = [4 <= at < 9 or at >= 21 for at in range(len(tokens))]
    played = trajectory("ask>", "it is 5", 1.0) | {
        "text": "".join(tokens), "tokens": list(range(len(tokens))), "lengths": [1] * len(tokens), "loss_mask": written,
        "versions": [1 if own else -1 for own in written], "rollout_logprobs": [0.0] * len(tokens), "advantages": []}
    write_rollouts(tmp_path, 1, [group("ask>", played, answer="<5>", named_rewards={})])
    section = samples_html(list(read_rollouts(tmp_path)))
    assert re.findall(r'<div class="(asked|written|given|expected)">([^<]*)</div>', section) == [
        ("asked", "ask&gt;"), ("written", "call|"), ("given", "tool says 5|"), ("written", "it is 5"), ("expected", "answer: &lt;5&gt;")]


def test_none_is_shown_twice(tmp_path: Path) -> None:
    assert chosen(tmp_path, group("p", ("good and long", 1.0), ("bad", 0.0))) == [
        ("best", "good and long"), ("worst", "bad")]
    assert chosen(tmp_path, group("p", ("same", 1.0), ("same", 1.0))) == [("best", "same")]
    assert chosen(tmp_path, group("p", ("same", 1.0)), group("q", ("same", 1.0), index=1)) == [("best", "same")]
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


def test_a_card_keeps_the_lines_of_what_was_written_and_shows_all_as_text() -> None:
    card = answer_card("gained", prompt="<b>", played=played_html([("given", "1\n2"), ("written", "<i>")]), answer="")
    assert card == (
        '<figure class="card rollout"><h3>Gained</h3><div class="asked">&lt;b&gt;</div><div class="played"><div class="given">1\n2</div>'
        '<div class="written">&lt;i&gt;</div></div></figure>')
    rules = {selector.strip(): body for selectors, body in re.findall(r"([^{}]+){([^{}]*)}", STYLE) for selector in selectors.split(",")
             if "white-space: pre-wrap" in body}
    assert {f".rollout .{css}" for css in ("asked", "written", "given", "expected")} <= rules.keys()
