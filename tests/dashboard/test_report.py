"""The report of a run."""

import html
import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from offbeat.api.run import Run
from offbeat.dashboard.report import write_report
from offbeat.errors import DataError

_SPEC = importlib.util.spec_from_file_location("synthetic", Path(__file__).with_name("synthetic.py"))
synthetic = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(synthetic)


class Balanced(HTMLParser):
    """Checks that every element that is opened is closed, in order."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(page):
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser.seen


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "sort8"
    synthetic.write_synthetic_run(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def page(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    return path.read_text()


def test_the_page_is_well_formed_and_needs_nothing_else(page):
    for tag, attributes in parse(page):
        assert tag not in ("link", "img", "iframe"), tag
        assert not {"src", "href"} & attributes.keys()
    assert "url(" not in page and "@import" not in page
    assert not re.search(r"\$[a-z{]", page)


def test_key_figures_are_those_of_the_metrics(page, run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    figures = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page))
    held_out = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert figures["held-out accuracy"] == f"{held_out[0]:.2f} → {held_out[-1]:.2f}"
    assert figures["steps"] == "60"
    assert figures["time in steps"] == f"{sum(row.get('step/total_s', 0) for row in rows):.1f} s"
    assert figures["staleness"] == "2" and "bound 2" in page
    assert figures["log-prob gap"] == f"{max(row.get('policy/canary_gap', 0) for row in rows):.0e}"
    assert int(figures["overlap"].rstrip("%")) > 80


def test_a_notebook_shows_figures_and_curves_of_a_run_in_a_frame_of_their_own(run_dir):
    cell = Run(run_dir)._repr_html_()
    assert cell.startswith("<iframe title=") and cell.count("<") == 2, "nothing of its styles reaches the notebook"
    shown = html.unescape(cell)
    assert "<dt>held-out accuracy</dt>" in shown and "mean of the first and the last 5 steps" in shown and "<svg" in shown


def test_every_curve_and_both_time_lines_are_there(page):
    titles = re.findall(r"<h3>([^<]*?)(?: <small>.*?)?</h3>", html.unescape(page))
    assert titles == [
        "Held-out accuracy", "Reward", "Staleness", "Trainer-engine log-probability gap", "Throughput", "Where a step's time goes",
        "Loss", "Gradient norm", "Entropy", "Learning rate", "Whole run", "A few steps",
    ]
    assert page.count("<svg") == 12


def test_each_evaluation_set_has_a_curve_and_a_figure(tmp_path):
    rows = [{"global_step": step, "eval/accuracy": 0.5, "eval/hard/accuracy": step / 4, "eval/accuracy/x": 0.5} for step in (0, 1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = html.unescape(write_report(tmp_path).read_text())
    figures = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page))
    assert figures["held-out accuracy"] == "0.50 → 0.50" and figures["accuracy on hard"] == "0.00 → 0.50"
    assert re.findall(r'"label":"([^"]*)"', page) == ["held-out prompts", "hard"]


@pytest.mark.parametrize(("evaluated", "value", "when"), [
    ([0], "0.00", "before the first step"), ([2], "0.20", "after step 2"), ([3], "0.30", "after the last step"),
    ([0, 3], "0.00 → 0.30", "first → last"), ([0, 1, 2], "0.00 → 0.20", "first → last, after step 2")])
def test_the_held_out_accuracy_says_when_it_was_measured(evaluated, value, when, tmp_path):
    rows = [{"global_step": step} | ({"eval/accuracy": step / 10} if step in evaluated else {}) for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = html.unescape(write_report(tmp_path).read_text())
    assert re.findall(r"<dt>held-out accuracy</dt><dd>([^<]*)</dd><small>([^<]*)</small>", page) == [(value, when)]


def test_the_report_has_each_sentence_of_advice_that_the_run_was_given_once(tmp_path, page):
    told = ["publishing takes 6.0 of 20.0 s a step", "all groups had equal rewards (<b>0</b> in each)"]
    events = [{"kind": "advice", "time_s": float(i), "text": text} for i, text in enumerate([*told, told[0]])]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"global_step": 1, "reward/mean": 0.0}) + "\n")
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    report = write_report(tmp_path).read_text()
    parse(report)
    assert re.findall(r'<p class="advice">(.*?)</p>', report) == [html.escape(text) for text in told]
    assert 'class="advice"' not in page


def test_episodes_of_several_turns_have_a_section_of_their_own(tmp_path, page):
    assert "<h2>Episodes</h2>" not in page
    spent = {"rollout/episode_mean_s": 4.0, "rollout/model_share": 0.25, "rollout/tool_share": 0.5, "rollout/queue_share": 0.25}
    rows = [{"global_step": step, "rollout/turns_mean": 2.5} | spent for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path).read_text()
    parse(page)
    section = html.unescape(page.partition("<h2>Episodes</h2>")[2].partition("<h2>")[0])
    parts = json.loads(re.search(r'data-chart="(\[.*?\])">', section)[1])
    assert {each["label"]: each["points"][0][2] for each in parts} == {"model calls": 1.0, "tools and environments": 2.0, "queue": 1.0}
    assert "Turns" in section


def test_events_and_configuration_are_listed(page):
    assert "Events (61)" in page
    assert "canary log-probability off by 0.02" in page
    assert "max_head_offpolicyness = 2" in page


def test_a_run_that_has_only_begun_says_so(tmp_path):
    (tmp_path / "config.toml").write_text('[run]\nname = "<b>"\n')
    page = write_report(tmp_path).read_text()
    parse(page)
    assert "No metrics yet" in page and "No time line was recorded" in page
    assert "&lt;b&gt;" in page and "<b>" not in page


def test_metrics_without_anything_else_are_drawn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"global_step": 1, "reward/mean": 0.5, "time_s": 1.0}\n{"torn')
    page = write_report(tmp_path).read_text()
    parse(page)
    assert page.count("<svg") == 1


def test_rewards_by_name_share_a_chart_whatever_their_names(tmp_path):
    names = ["right", "<script>alert(1)</script>", 'a "quoted" $name', "form", "length"]
    named = {f"reward/{name}_mean": 0.25 for name in names}
    rows = [{"global_step": step, "reward/mean": 0.5, "time_s": 1.0} | named for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path).read_text()
    parse(page)
    assert page.count("<svg") == 2 and "Rewards by name" in page and '<i class="c1"></i>right</span>' in page
    assert "<script>alert" not in page


def test_what_users_wrote_cannot_become_markup_or_placeholders(tmp_path):
    nasty = '<script>alert(1)</script> $name ${x} "quoted"'
    (tmp_path / "config.toml").write_text(f"[data]\ntask = '{nasty}'\n")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "events.jsonl").write_text(json.dumps({"kind": nasty, "reason": nasty}) + "\n")
    (tmp_path / "result.json").write_text(json.dumps({nasty: [nasty]}))
    trace = {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": nasty}}
    span = {"ph": "X", "name": nasty, "tid": 1, "ts": 0, "dur": 5, "args": {nasty: nasty}}
    (tmp_path / "trace.json").write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in (trace, span)))
    page = write_report(tmp_path).read_text()
    parse(page)
    assert "<script>alert" not in page and page.count("<script") == 1


def test_a_long_run_makes_a_page_of_bounded_size(tmp_path):
    run_dir = tmp_path / "long"
    synthetic.write_synthetic_run(run_dir, num_steps=3000)
    assert write_report(run_dir).stat().st_size < 3_000_000


def test_writing_again_replaces_the_report_and_leaves_nothing_else(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    write_report(tmp_path)
    write_report(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="is not a run's folder"):
        write_report(tmp_path)
