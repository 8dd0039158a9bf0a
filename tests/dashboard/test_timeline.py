"""The time line as SVG."""

import random
import xml.etree.ElementTree as ET

import pytest

from offbeat.dashboard.timeline import LEFT, RIGHT, WIDTH, draw_whole, draw_window, legend, middle_window, overlap
from offbeat.telemetry.trace import Span


def bars(svg):
    """(x, width, tip) of every bar."""
    rects = [rect for rect in ET.fromstring(svg).iter("rect") if rect.get("data-tip")]
    return [(float(rect.get("x")), float(rect.get("width")), rect.get("data-tip")) for rect in rects]


def one_run(num_steps):
    """Steps of 1 s: 0.4 s of waiting, 0.6 s of training."""
    spans = []
    for step in range(num_steps):
        t = 100.0 + step
        spans += [Span("rollout", "controller", t, t + 0.4, {"step": step}), Span("train", "controller", t + 0.4, t + 1, {"step": step})]
    return spans


def test_overlap_is_the_share_of_training_time_with_generation():
    training = [Span("train", "controller", 0, 10), Span("train", "controller", 20, 30)]
    engines = [Span("generate", "engine 0", 5, 8), Span("generate", "engine 1", 7, 22), Span("generate", "engine 0", 29, 50)]
    assert overlap(training + engines) == pytest.approx((5 + 2 + 1) / 20)
    assert overlap(training) == 0
    assert overlap(engines) is None


def test_overlap_agrees_with_counting_seconds_one_by_one():
    rng = random.Random(1)
    for _ in range(50):
        spans = []
        for name, track in (("train", "controller"), ("generate", "engine 0"), ("generate", "engine 1")):
            for _ in range(rng.randint(1, 6)):
                start = rng.randint(0, 90)
                spans.append(Span(name, track, start, start + rng.randint(1, 15)))
        seconds = [(s.name, t) for s in spans for t in range(int(s.start_s), int(s.end_s))]
        train, generate = ({t for name, t in seconds if name == wanted} for wanted in ("train", "generate"))
        assert overlap(spans) == pytest.approx(len(train & generate) / len(train))


def test_the_window_holds_five_steps_of_the_middle():
    assert middle_window(one_run(21)) == (108.0, 113.0)
    assert middle_window(one_run(4)) == (100.0, 104.0)


def test_the_window_draws_every_span_to_scale_and_cuts_at_its_edges():
    spans = [*one_run(21), Span("generate", "engine 0", 107.0, 110.5)]
    scale = (WIDTH - LEFT - RIGHT) / 5
    drawn = bars(draw_window(spans))
    assert len(drawn) == 2 * 5 + 1
    x, width, tip = drawn[-1]
    assert (x, width) == pytest.approx((LEFT, 2.5 * scale), abs=0.1)
    assert tip == "engine 0 · generate · 3.50 s"
    assert drawn[1][2] == "controller · train · 600 ms · step 8"


def test_the_window_names_its_steps():
    labels = [text.text for text in ET.fromstring(draw_window(one_run(21))).iter("text") if text.text.startswith("step")]
    assert labels == ["step 8", "step 9", "step 10", "step 11", "step 12"]


def test_the_whole_run_shows_each_stretch_where_it_was():
    drawn = bars(draw_whole(one_run(10)))
    scale = (WIDTH - LEFT - RIGHT) / 10
    assert len(drawn) == 20
    for i, (x, width, tip) in enumerate(drawn):
        start = i // 2 + (0.4 if i % 2 else 0)
        assert x == pytest.approx(LEFT + start * scale, abs=0.6)
        assert width == pytest.approx((0.6 if i % 2 else 0.4) * scale, abs=1.1)
        assert ("train" if i % 2 else "wait for rollouts") in tip


def test_a_run_of_any_length_costs_a_bounded_number_of_bars():
    assert len(bars(draw_whole(one_run(20_000)))) <= 2 * (WIDTH - LEFT - RIGHT)


def test_rows_are_controller_then_ranks_then_engines_by_number():
    tracks = ["engine 10", "engine 2", "rank 0", "controller", "<other>"]
    spans = [Span("busy", track, 0, 1) for track in tracks]
    names = [text.text for text in ET.fromstring(draw_whole(spans)).iter("text") if text.get("class") == "track"]
    assert names == ["controller", "rank 0", "engine 2", "engine 10", "<other>"]


def test_the_legend_names_the_kinds_that_occur_once():
    shown = legend([Span("train", "controller", 0, 1), Span("train_step", "rank 0", 0, 1), Span("generate", "engine 0", 0, 1)])
    assert shown.count("</i>train<") == 1 and "generate" in shown and "publish" not in shown


def test_an_instant_is_drawn():
    assert "<svg" in draw_whole([Span("train", "controller", 5.0, 5.0)])
    assert "<svg" in draw_window([Span("train", "controller", 5.0, 5.0)])
