"""What each process did last."""

import html
import re

import pytest

from offbeat.dashboard.processes import activities, processes_html
from offbeat.dashboard.run_files import RunFiles
from offbeat.telemetry.trace import Span

SPANS = [
    Span("rollout", "controller", 0, 10), Span("train", "controller", 10, 100), Span("generate", "engine 1", 90, 100),
    Span("train_step", "rank 0", 60, 90), Span("generate", "engine 0", 0, 40), Span("model", "episode 3", 0, 100)]


def run(spans: list[Span], *events: dict) -> RunFiles:
    return RunFiles("a", "", {}, [], events, spans, {})


def test_each_process_has_its_last_activity_and_the_shares_of_the_last_minute() -> None:
    found = {each.track: each for each in activities(run(SPANS))}
    assert list(found) == ["controller", "rank 0", "engine 0", "engine 1"]
    assert (found["rank 0"].last, found["rank 0"].ended_s) == ("train", 10)
    assert found["rank 0"].shares == pytest.approx({"train": 0.5})
    assert found["engine 0"].shares == {} and found["engine 1"].shares == pytest.approx({"generate": 1 / 6})
    assert found["controller"].shares == pytest.approx({"train": 1.0})


def test_engines_out_of_service_say_why_until_they_are_healed() -> None:
    out = {"kind": "quarantine", "engine": "engine 1", "reason": "wrong <b>weights</b>"}
    states = [each.state for each in activities(run(SPANS, out))]
    assert states == ["in service", "in service", "in service", "out of service: wrong <b>weights</b>"]
    page = processes_html(run(SPANS, out))
    assert "<b>" not in page and "wrong <b>weights</b>" in html.unescape(page)
    healed = activities(run(SPANS, out, {"kind": "healed", "engine": "engine 1"}))
    assert healed[-1].state == "in service, healed"


def test_of_a_run_that_is_over_all_processes_have_ended() -> None:
    out = {"kind": "quarantine", "engine": "engine 1", "reason": "its process died"}
    assert {each.state for each in activities(run(SPANS, out), is_live=False)} == {"ended"}
    assert "in service" not in processes_html(run(SPANS), is_live=False)


def test_the_table_has_a_row_for_each_process() -> None:
    rows = re.findall(r"<tr><td>(.*?)</td><td>.*?</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", processes_html(run(SPANS)))
    assert rows[1] == ("rank 0", "train", "10.0 s ago", "train 50%")
    assert rows[2][3] == "idle" and rows[3][2] == "just now"


def test_without_a_time_line_there_is_no_table() -> None:
    assert activities(run([])) == [] and processes_html(run([])) == ""
