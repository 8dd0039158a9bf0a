"""Line charts as SVG."""

import html
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from offbeat.dashboard import charts
from offbeat.dashboard.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Series,
    draw,
    linear_ticks,
    log_ticks,
    smoothed,
    thinned,
    tick_label,
)


def coordinates(svg, css="line"):
    """The points of each path with a class."""
    paths = [path for path in ET.fromstring(svg).iter("path") if css in path.get("class").split()]
    return [[tuple(map(float, pair.split())) for pair in path.get("d")[1:].split("L")] for path in paths]


def test_points_are_placed_linearly_between_the_ends_of_the_axes():
    (points,) = coordinates(draw(Chart("t", "", [Series("a", [(0, 0.0), (5, 0.5), (10, 1.0)])], y_range=(0, 1))))
    middle = (LEFT + (WIDTH - LEFT - RIGHT) / 2, TOP + (HEIGHT - TOP - BOTTOM) / 2)
    assert points == [(LEFT, HEIGHT - BOTTOM), pytest.approx(middle), (WIDTH - RIGHT, TOP)]


def test_parts_of_a_whole_lie_on_each_other_and_tell_their_own_values():
    parts = [Series("a", [(0, 1.0), (1, 2.0)]), Series("b", [(0, 3.0), (1, 2.0)], "c2")]
    svg = draw(Chart("t", "", parts, y_range=(0, None), stacked=True))
    upper, lower = coordinates(svg.replace("Z\"", "\""), "area")
    assert upper[1][1] == upper[2][1] < lower[2][1] < lower[1][1], "both sums are 4, and what reaches higher is drawn first"
    assert upper[0][1] == upper[3][1] == lower[0][1] == HEIGHT - BOTTOM
    hover = json.loads(ET.fromstring(svg).get("data-chart"))
    assert [[y for _, _, y in each["points"]] for each in hover] == [[1.0, 2.0], [3.0, 2.0]]


def test_labels_are_legible_where_a_phone_draws_charts_small():
    style = (Path(charts.__file__).parent / "style.css").read_text(encoding="utf-8")
    found = re.search(r"@media \(max-width: (\d+)px\) { svg.chart text { font-size: (\d+)px; } }", style)
    drawn_px = 390 - 80  # a phone's width without the margins of page and card
    assert found is not None and int(found[1]) > 390 and int(found[2]) * drawn_px / WIDTH > 10


def test_a_log_scale_gives_each_decade_the_same_height_and_leaves_out_zero():
    (points,) = coordinates(draw(Chart("t", "", [Series("a", [(0, 1e-4), (1, 1e-3), (2, 1e-2), (3, 0.0)])], log=True)))
    assert len(points) == 3
    assert points[0][1] - points[1][1] == pytest.approx(points[1][1] - points[2][1], abs=0.11)


def test_the_bound_lies_where_a_point_of_its_value_would():
    svg = draw(Chart("t", "", [Series("a", [(0, 0.0), (1, 2.0)])], y_range=(0, None), bound=2))
    (bound,) = [line for line in ET.fromstring(svg).iter("line") if line.get("class") == "bound"]
    assert float(bound.get("y1")) == coordinates(svg)[0][1][1]


def test_a_bound_above_all_points_is_within_the_chart():
    svg = draw(Chart("t", "", [Series("a", [(0, 0.0), (1, 1.0)])], bound=5))
    (bound,) = [line for line in ET.fromstring(svg).iter("line") if line.get("class") == "bound"]
    assert TOP <= float(bound.get("y1")) < coordinates(svg)[0][1][1]


@pytest.mark.parametrize("points", [[(3, 0.5)], [(1, 2.0), (2, 2.0)], [(0, -1e-9), (1, 1e9)], [(0, 0.0), (1, 0.0)]])
@pytest.mark.parametrize("log", [False, True])
def test_single_equal_and_extreme_values_are_drawn_within_the_chart(points, log):
    chart = Chart("t", "", [Series("a", points)], log=log)
    if not chart.points():
        with pytest.raises(ValueError, match="has no points"):
            draw(chart)
        return
    for x, y in coordinates(draw(chart))[0]:
        assert LEFT <= x <= WIDTH - RIGHT
        assert TOP <= y <= HEIGHT - BOTTOM


def test_what_is_not_finite_is_left_out():
    assert Chart("t", "", [Series("a", [(0, math.nan), (1, math.inf), (2, 1.0)])]).points() == [(2, 1.0)]


def test_hover_data_holds_the_values_of_every_line():
    svg = draw(Chart("t", "", [Series("a<b", [(0, 1.0), (1, 0.123456)]), Series("c", [], "c2")]))
    data = json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', svg).group(1)))
    assert [series["label"] for series in data] == ["a<b", "c"]
    assert [point[1:] for point in data[0]["points"]] == [[0, 1.0], [1, 0.1235]]


def test_smoothing_is_the_running_mean():
    assert smoothed([(0, 1.0), (1, 3.0), (2, 5.0), (3, 7.0)], window=2) == [(0, 1.0), (1, 2.0), (2, 4.0), (3, 6.0)]


def test_thinning_keeps_every_spike_and_the_order():
    points = [(float(i), math.sin(i / 50)) for i in range(20_000)]
    points[7_777] = (7_777.0, 9.0)
    points[12_345] = (12_345.0, -9.0)
    thin = thinned(points, most=400)
    assert len(thin) <= 402
    assert thin == sorted(thin)
    assert {points[7_777], points[12_345]} <= set(thin) <= set(points)
    assert thinned(points[:400], most=400) == points[:400]


def test_ticks_are_round_and_inside():
    assert linear_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert linear_ticks(-0.013, 0.011) == [-0.01, -0.005, 0, 0.005, 0.01]
    assert linear_ticks(3, 62, about=6) == [10, 20, 30, 40, 50, 60]
    assert log_ticks(1e-5, 1e-2) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2])
    assert len(log_ticks(1e-30, 1e10)) <= 7
    assert [tick_label(v) for v in (0, 0.25, 5000, 20_000, 3e6)] == ["0", "0.25", "5000", "20k", "3M"]
    assert tick_label(1e-5, log=True) == "1e-5"
