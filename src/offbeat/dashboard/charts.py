"""Line charts as SVG text, drawn without libraries so that a report is one file. Colours are CSS classes of `style.css`.

Every chart is complete without scripts. Its points are also in a `data-chart` attribute, from which the page shows values on hover.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26
_MOST_POINTS = 800

Point = tuple[float, float]
Range = tuple[float | None, float | None]
ANY_RANGE: Range = (None, None)


@dataclass(frozen=True)
class Series:
    """One line: its label, its points by increasing x, its colour ("c1" to "c4") and the style in which it is drawn."""

    label: str
    points: Sequence[Point]
    colour: str = "c1"
    style: Literal["line", "faint", "dots"] = "line"


@dataclass(frozen=True)
class Chart:
    """Lines over global steps, with an optional dashed bound; or parts of a whole, each drawn as an area on top of those before it."""

    title: str
    unit: str
    series: Sequence[Series]
    log: bool = False
    y_range: Range = ANY_RANGE
    bound: float | None = None
    bound_label: str = ""
    stacked: bool = False

    def points(self) -> list[Point]:
        """Return the points that can be drawn: finite ones, and only positive ones on a log scale."""
        return [point for tops in self.tops() for point in tops]

    def tops(self) -> list[list[Point]]:
        """Return the points of each series as drawn; a stacked chart adds up the series, in their order."""
        found: list[list[Point]] = []
        below: dict[float, float] = {}
        for series in self.series:
            points = [(x, y) for x, y in series.points if math.isfinite(y) and (y > 0 or not self.log)]
            if self.stacked:
                points = [(x, below.get(x, 0.0) + y) for x, y in points]
                below |= dict(points)
            found.append(points)
        return found


def smoothed(points: Sequence[Point], *, window: int) -> list[Point]:
    """Return the running mean of y over the last `window` points."""
    ys = [y for _, y in points]
    return [(x, sum(ys[max(0, i - window + 1) : i + 1]) / min(i + 1, window)) for i, (x, _) in enumerate(points)]


def thinned(points: Sequence[Point], *, most: int = _MOST_POINTS) -> list[Point]:
    """Reduce to about `most` points that look the same: the lowest and the highest point of each bucket."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept: list[Point] = []
    for i in range(0, len(points), size):
        bucket = points[i : i + size]
        kept.extend(sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}))
    return kept


def linear_ticks(low: float, high: float, *, about: int = 5) -> list[float]:
    """Return round numbers from `low` to `high`, spaced by 1, 2, 2.5 or 5 times a power of ten, e.g. [0, 0.2, 0.4, 0.6, 0.8, 1]."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return at most seven powers of ten that span `low` to `high`, e.g. [0.001, 0.01, 0.1] for 0.002 to 0.1."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**i for i in range(first, last + 1, max(1, math.ceil((last - first) / 6)))]


def tick_label(value: float, *, log: bool = False) -> str:
    """Format a tick in few characters, such as 0.25, 20k or 1e-5."""
    if log:
        return f"1e{round(math.log10(value))}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:g}"


def draw(chart: Chart) -> str:
    """Draw the chart as an `<svg>` element; raises ValueError if there is no point to draw."""
    points = chart.points()
    if not points:
        raise ValueError(f"chart {chart.title!r} has no points")
    x_low, x_high = _spread(min(x for x, _ in points), max(x for x, _ in points))
    y_low, y_high = _y_range(chart, [y for _, y in points])
    ticks = log_ticks(y_low, y_high) if chart.log else linear_ticks(y_low, y_high)

    def place_x(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def place_y(y: float) -> float:
        share = math.log(y / y_low) / math.log(y_high / y_low) if chart.log else (y - y_low) / (y_high - y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in ticks:
        y = place_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{tick_label(tick, log=chart.log)}</text>')
    for tick in linear_ticks(x_low, x_high, about=6):
        if tick == int(tick):
            parts.append(f'<text class="tick" x="{place_x(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{tick:.0f}</text>')
    hover: list[dict[str, Any]] = []
    drawn: list[str] = []
    for series, tops in zip(chart.series, chart.tops(), strict=True):
        values, own = thinned(tops), dict(series.points if chart.stacked else tops)
        placed = [(place_x(x), place_y(y)) for x, y in values]
        drawn.append(_area(series, placed) if chart.stacked else _line(series, placed))
        shown = [[round(px, 1), x, float(f"{own[x]:.4g}")] for (px, _), (x, _) in zip(placed, values, strict=True)]
        hover.append({"label": series.label, "points": shown})
    parts += drawn[::-1] if chart.stacked else drawn  # each area reaches down to the axis, so that lower ones come over it
    if chart.bound is not None:
        y = place_y(chart.bound)
        parts.append(f'<line class="bound" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    data = escape(json.dumps(hover, separators=(",", ":")), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}" data-chart="{data}">'
        f"{''.join(parts)}</svg>"
    )


def _line(series: Series, placed: Sequence[Point]) -> str:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
    line = f'<path class="line {series.colour} {series.style}" d="{path}"/>' if placed else ""
    if series.style == "dots" or len(placed) == 1:
        line += "".join(f'<circle class="dot {series.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed)
    return line


def _area(series: Series, placed: Sequence[Point]) -> str:
    if len(placed) < 2:
        return _line(series, placed)
    base = HEIGHT - BOTTOM
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in [(placed[0][0], base), *placed, (placed[-1][0], base)])
    return f'<path class="area {series.colour}" d="M{path}Z"/>'


def _y_range(chart: Chart, ys: Sequence[float]) -> tuple[float, float]:
    """Return a range with room for all points and the bound; whole decades on a log scale."""
    low, high = min(ys), max(ys)
    if chart.bound is not None:
        low, high = min(low, chart.bound), max(high, chart.bound)
    if chart.log:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        return (low, high) if high > low else (low / 10, high * 10)
    given_low, given_high = chart.y_range
    low, high = _spread(low if given_low is None else min(low, given_low), high if given_high is None else max(high, given_high))
    margin = (high - low) * 0.06
    return (low if given_low is not None else low - margin), (high if given_high is not None else high + margin)


def _spread(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - max(abs(low) * 0.05, 0.5), high + max(abs(high) * 0.05, 0.5))
