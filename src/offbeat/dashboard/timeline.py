"""Timeline of a run as SVG text: one row per track of `trace.json`, coloured by activity.

There are two views. The whole run is drawn in columns of half a pixel, each coloured by the activity that took most of it, so that the
cost does not depend on the length of the run. A window of a few steps shows every span. Colours are CSS classes of `style.css`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from offbeat.dashboard.charts import linear_ticks
from offbeat.telemetry.trace import Span

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 1136, 112, 8, 22, 30, 20

# Activities in the order of the legend: (name of the span, CSS class, label).
KINDS = (
    ("rollout", "k-wait", "wait for rollouts"),
    ("score", "k-score", "score"),
    ("advantage", "k-advantage", "advantage"),
    ("train", "k-train", "train"),
    ("train_step", "k-train", "train"),
    ("publish", "k-publish", "publish"),
    ("evaluate", "k-evaluate", "evaluate"),
    ("checkpoint", "k-checkpoint", "checkpoint"),
    ("generate", "k-generate", "generate"),
    ("asleep", "k-wait", "asleep"),
    ("queue", "k-wait", "wait for a place"),
    ("model", "k-generate", "model call"),
    ("tool", "k-tool", "tools"),
    ("reward", "k-score", "reward"),
)
_CLASSES = {name: css for name, css, _ in KINDS}
_LABELS = {name: label for name, _, label in KINDS}

Interval = tuple[float, float]


def label_of(name: str) -> str:
    """Return the label of an activity in the legend, such as "model call" for "model"."""
    return _LABELS.get(name, name)


def overlap(spans: Sequence[Span]) -> float | None:
    """Return the share of training time during which at least one engine was generating; None without training.

    0 means strictly alternating; 1 means that training never held up generation.
    """
    training = _union((s.start_s, s.end_s) for s in spans if s.track == "controller" and s.name == "train")
    generating = _union((s.start_s, s.end_s) for s in spans if s.track.startswith("engine") and s.name == "generate")
    total_s = sum(end - start for start, end in training)
    both_s = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in _meeting(training, generating))
    return both_s / total_s if total_s > 0 else None


def middle_window(spans: Sequence[Span], *, num_steps: int = 5) -> Interval:
    """Return the interval of `num_steps` steps in the middle of the run, in wall-clock seconds; of the whole run if it has no more."""
    starts = sorted(s.start_s for s in spans if s.track == "controller" and s.name == "rollout")
    if len(starts) <= num_steps:
        return _extent(spans)
    first = (len(starts) - num_steps) // 2
    return starts[first], starts[first + num_steps]


def legend(spans: Sequence[Span]) -> str:
    """Return a legend of the activities that occur, as HTML."""
    present = {s.name for s in spans}
    shown = {label: css for name, css, label in KINDS if name in present}
    return "".join(f'<span class="key"><i class="{css}"></i>{escape(label)}</span>' for label, css in shown.items())


def draw_whole(spans: Sequence[Span]) -> str:
    """Draw the whole run as an `<svg>` element, with the middle window marked."""
    start_s, end_s = _extent(spans)
    rows = rows_by_track(spans)
    num_columns = 2 * (WIDTH - LEFT - RIGHT)
    column_s = (end_s - start_s) / num_columns
    parts = []
    for row, (track, row_spans) in enumerate(rows.items()):
        for first, last, name in _runs(_columns(row_spans, start_s, column_s, num_columns)):
            begin_s, length_s = first * column_s, (last - first) * column_s
            tip = f"{track} · {label_of(name)} · {begin_s:.1f} s to {begin_s + length_s:.1f} s"
            parts.append(_bar(row, LEFT + first / 2, (last - first) / 2, name, tip))
    window = middle_window(spans)
    if window != (start_s, end_s):
        x1, x2 = (LEFT + (t - start_s) / column_s / 2 for t in window)
        parts.append(f'<rect class="window" x="{x1:.1f}" y="{TOP - 4}" width="{x2 - x1:.1f}" height="{len(rows) * ROW + 2}" rx="3"/>')
    return _frame(list(rows), parts, (0.0, end_s - start_s), "Time line of the whole run")


def draw_window(spans: Sequence[Span]) -> str:
    """Draw the middle of the run as an `<svg>` element: every span, and a line at the start of each step."""
    low, high = middle_window(spans)
    run_start_s, _ = _extent(spans)
    scale = (WIDTH - LEFT - RIGHT) / (high - low)
    rows = rows_by_track(spans)
    parts = []
    for span in spans:
        if span.track == "controller" and span.name == "rollout" and low <= span.start_s < high:
            x = LEFT + (span.start_s - low) * scale
            parts.append(f'<line class="step" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 16}" y2="{TOP + len(rows) * ROW - 6}"/>')
            if "step" in span.args:
                parts.append(f'<text class="tick" x="{x + 5:.1f}" y="{TOP - 7}">step {escape(str(span.args["step"]))}</text>')
    for row, (track, row_spans) in enumerate(rows.items()):
        for span in row_spans:
            begin, end = max(span.start_s, low), min(span.end_s, high)
            if begin < end:
                tip = f"{track} · {label_of(span.name)} · {_duration(span.end_s - span.start_s)}{_arguments(span.args)}"
                parts.append(_bar(row, LEFT + (begin - low) * scale, max((end - begin) * scale, 0.6), span.name, tip))
    return _frame(list(rows), parts, (low - run_start_s, high - run_start_s), "Time line of the middle of the run")


def rows_by_track(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Group spans by track: the controller, then train ranks, then engines, each by number, then any others, such as episodes."""
    rows: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        rows[span.track].append(span)
    order = {"controller": 0, "rank": 1, "engine": 2}

    def key(track: str) -> tuple[int, int, str]:
        number = re.search(r"\d+$", track)
        return order.get(track.split()[0].rstrip(",") if track else "", 3), int(number.group()) if number else 0, track

    return {track: rows[track] for track in sorted(rows, key=key)}


def _extent(spans: Sequence[Span]) -> Interval:
    start_s, end_s = min(s.start_s for s in spans), max(s.end_s for s in spans)
    return start_s, max(end_s, start_s + 1e-3)


def _columns(spans: Sequence[Span], start_s: float, column_s: float, num_columns: int) -> list[str]:
    """Return, for each column, the name of the activity that took most of it; "" if less than half of the column was used."""
    spent: list[dict[str, float]] = [defaultdict(float) for _ in range(num_columns)]
    for span in spans:
        begin, end = (span.start_s - start_s) / column_s, (span.end_s - start_s) / column_s
        for i in range(int(begin), min(int(end) + 1, num_columns)):
            spent[i][span.name] += min(end, i + 1) - max(begin, i)
    return [max(column, key=lambda name: column[name]) if sum(column.values()) >= 0.5 else "" for column in spent]


def _runs(names: Sequence[str]) -> Iterable[tuple[int, int, str]]:
    """Yield runs of equal adjacent names as (first, one past the last, name); gaps are left out."""
    first = 0
    for i in range(1, len(names) + 1):
        if i == len(names) or names[i] != names[first]:
            if names[first]:
                yield first, i, names[first]
            first = i


def _bar(row: int, x: float, width: float, name: str, tip: str) -> str:
    css = _CLASSES.get(name, "k-other")
    y = TOP + row * ROW
    return f'<rect class="{css}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" data-tip="{escape(tip, quote=True)}"/>'


def _frame(tracks: Sequence[str], parts: Iterable[str], extent: Interval, label: str) -> str:
    """Draw track names, row backgrounds and a scale in seconds around the bars."""
    low, high = extent
    height = TOP + len(tracks) * ROW + 16
    back = []
    for row, track in enumerate(tracks):
        y = TOP + row * ROW
        back.append(f'<rect class="row" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{BAR}"/>')
        back.append(f'<text class="track" x="{LEFT - 10}" y="{y + BAR / 2 + 4}" text-anchor="end">{escape(track)}</text>')
    for tick in linear_ticks(low, high, about=10):
        x = LEFT + (tick - low) / (high - low) * (WIDTH - LEFT - RIGHT)
        back.append(f'<text class="tick" x="{x:.1f}" y="{height - 6}" text-anchor="middle">{tick:g} s</text>')
    return f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(back)}{"".join(parts)}</svg>'


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _arguments(args: Mapping[str, object]) -> str:
    return "".join(f" · {name} {value:.4g}" if isinstance(value, float) else f" · {name} {value}" for name, value in args.items())


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sort the intervals and join overlapping ones."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _meeting(left: Sequence[Interval], right: Sequence[Interval]) -> Iterable[tuple[Interval, Interval]]:
    """Yield pairs of intervals from two sorted, disjoint lists that may overlap; they include every overlapping pair."""
    i = j = 0
    while i < len(left) and j < len(right):
        yield left[i], right[j]
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
