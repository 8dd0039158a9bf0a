"""The long soak as a section of docs/soak.md, with its curves as pictures. Pure but for `write_page`; called by `hours.py`."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from offbeat.dashboard.charts import Chart, Series, draw
from soak.growth import Point, Slope, slope
from soak.watch import Row

BEGIN, END = "<!-- begin: hours -->\n", "<!-- end: hours -->\n"
FIGURES = {
    "controller_mb": ("memory of the program itself", "MB"), "ranks_mb": ("memory of the two train ranks", "MB"),
    "lasting_mb": ("memory of the engine that is never killed", "MB"), "controller_fds": ("file descriptors of the program", ""),
    "ranks_fds": ("file descriptors of the ranks", ""), "lasting_fds": ("file descriptors of that engine", ""),
    "weights_mb": ("disk: published adapters", "MB"), "sample_p50_s": ("latency of a sample, median of the minute", "s"),
    "sample_p99_s": ("latency of a sample, p99 of the minute", "s"), "publish_p50_s": ("latency of a publish, median of the minute", "s")}
"""What must not grow: its name and unit."""
MUST_NOT_GROW = tuple(name for name in FIGURES if name.endswith(("_mb", "_fds")))
CHARTS = {
    "soak-memory": ("Memory", "MB", {"controller_mb": "the program", "ranks_mb": "train ranks", "lasting_mb": "engine 0"}),
    "soak-latency": ("Latency of a sample", "s", {"sample_p50_s": "median", "sample_p99_s": "p99"}),
    "soak-descriptors": ("File descriptors", "", {
        "controller_fds": "the program", "ranks_fds": "train ranks", "lasting_fds": "engine 0"}),
    "soak-disk": ("Disk", "MB", {"weights_mb": "published adapters", "log_mb": "events"})}
"""Pictures of docs/images: title, unit, and lines."""
_METHOD = """\
A slope is that of a straight line through means of five minutes, each sitting at a level of its own and without its first quarter of an
hour. A figure grows where its whole interval is above 0 and the line has risen by more than 1 % in the whole time.
"""
_STYLE = """\
text { font: 12px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #546e7a; }
.grid { stroke: #e0e4e8; } .line { fill: none; stroke-width: 1.6; }
.c1 { stroke: #2563eb; } .c2 { stroke: #ea7317; } .c3 { stroke: #0d9d75; }
.label { stroke: none; } .label.c1 { fill: #2563eb; } .label.c2 { fill: #ea7317; } .label.c3 { fill: #0d9d75; }
"""


@dataclass(frozen=True)
class Sitting:
    """A part of the soak in one process.

    Attributes:
        places: adapters that an engine holds.
        versions, idle_versions: published; of these, of tenants that were not trained since the last.
        tokens: compared with what was expected.
        complaints: whatever was not as promised.
        faults: of each, its kind, and seconds until it was noticed and healed.
    """

    sitting: int
    seconds: float
    tenants: int
    engines: int
    places: int
    versions: int
    tokens: int
    idle_versions: int
    complaints: list[str]
    faults: list[dict[str, Any]]


def write_page(docs: Path, rows: Sequence[Row], sittings: Sequence[Sitting]) -> None:
    """Put the section into `soak.md`, and the charts beside the other pictures."""
    for name, (title, unit, lines) in CHARTS.items():
        (docs / "images" / f"{name}.svg").write_text(picture(rows, title, unit, lines))
    page = docs / "soak.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + section(rows, sittings) + END + rest.partition(END)[2])


def section(rows: Sequence[Row], sittings: Sequence[Sitting]) -> str:
    """The section's text."""
    ends = [own[-1].at_s / 3600 for own in _by_sitting(rows)]
    first, faults = sittings[0], [fault for sitting in sittings for fault in sitting.faults]
    complaints = [text for sitting in sittings for text in sitting.complaints]
    even = sorted(row.imbalance for row in rows if row.imbalance)
    return "\n".join([
        f"{sum(ends):.2f} hours so far, by sittings {' + '.join(f'{end:.2f}' for end in ends)}: {first.tenants} tenants,"
        f" {first.engines} engines of {first.places} places,",
        f"{sum(s.versions for s in sittings):,} versions, {sum(row.samples for row in rows):,} requests,"
        f" {sum(s.tokens for s in sittings):,} tokens compared, {len(faults)} faults.",
        "All as promised." if not complaints else "Not as promised: " + "; ".join(complaints[:5]), "",
        f"In a minute in which all engines served, the busiest one was asked for {median(even):.2f} times the tokens of the mean"
        if even else "In every minute an engine was out of service",
        f"(median of {len(even)} minutes; the 95th of a hundred has {even[int(0.95 * len(even))]:.2f})." if even else ".",
        "", "| figure | mean | slope per hour, with its 95 % interval | |", "| --- | ---: | ---: | --- |",
        *(_verdict(name, found) for name in FIGURES if (found := _slope_of(rows, name))),
        "", _METHOD, *(f"![{title} over the hours](images/{name}.svg)\n" for name, (title, _, _) in CHARTS.items())]).rstrip() + "\n"


def growing(rows: Sequence[Row]) -> list[str]:
    """Names of the figures that grow."""
    return [name for name in MUST_NOT_GROW if (found := _slope_of(rows, name)) and found.grows]


def picture(rows: Sequence[Row], title: str, unit: str, lines: dict[str, str]) -> str:
    """A chart over hours as a file of its own; sittings follow each other."""
    series = []
    for number, (name, label) in enumerate(lines.items(), 1):
        points, begun_s = list[Point](), 0.0
        for own in _by_sitting(rows):
            points += [((begun_s + row.at_s) / 3600, getattr(row, name)) for row in own]
            begun_s += own[-1].at_s
        series.append(Series(label, points, f"c{number}"))
    top = 1.25 * max(value for line in series for _, value in line.points)  # room for the lines' names
    chart = Chart(title, unit, series, y_range=(0.0, top))
    drawn = draw(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="560" height="230" ', 1)
    drawn = drawn.partition(' data-chart="')[0] + ">" + drawn.partition(' data-chart="')[2].partition('">')[2]
    labels = [f'<text class="label c{at}" x="{62 + 120 * (at - 1)}" y="20">{line.label}</text>' for at, line in enumerate(series, 1)]
    labels.append(f'<text x="548" y="20" text-anchor="end">{title}{f", {unit}" if unit else ""}, over hours</text>')
    return drawn.replace(">", f"><title>{title}</title><style>{_STYLE}</style>", 1).replace("</svg>", "".join(labels) + "</svg>\n")


def _verdict(name: str, found: Slope) -> str:
    text, unit = FIGURES[name]
    label, interval = f"{text} ({unit})" if unit else text, f"({found.low:+.2g} to {found.high:+.2g})"
    return f"| {label} | {found.level:.4g} | {found.per_hour:+.2g} {interval} | {'grows' if found.grows else 'no growth'} |"


def _slope_of(rows: Sequence[Row], name: str) -> Slope | None:
    read: Callable[[Row], Point] = lambda row: (row.at_s, getattr(row, name))  # noqa: E731
    return slope([[read(row) for row in own] for own in _by_sitting(rows)])


def _by_sitting(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.sitting].append(row)
    return list(found.values())
