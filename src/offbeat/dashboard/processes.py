"""Table of a run's processes for the live page: the last activity of each, and how busy it was, from the time line and the events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.dashboard.evaluations import table_html
from offbeat.dashboard.run_files import RunFiles
from offbeat.dashboard.timeline import label_of, rows_by_track
from offbeat.telemetry.trace import Span

_RECENT_S = 60.0


@dataclass(frozen=True)
class Activity:
    """One row of the table.

    Attributes:
        last: label of the last span that has ended.
        ended_s: seconds from its end to that of the newest span of the run.
        shares: share of the last minute by label, largest first, such as {"train": 0.7, "wait for rollouts": 0.2}.
        state: state in the last event about it, else "in service", or "ended" if no process runs the run any more.
    """

    track: str
    last: str
    ended_s: float
    shares: Mapping[str, float]
    state: str


def activities(run: RunFiles, *, is_live: bool = True, recent_s: float = _RECENT_S) -> list[Activity]:
    """Return the controller, ranks and engines, in the order of the time line; episodes are left out."""
    if not run.spans:
        return []
    newest_s = max(span.end_s for span in run.spans)
    begin_s = max(newest_s - recent_s, min(span.start_s for span in run.spans))
    states, otherwise = (_states(run), "in service") if is_live else ({}, "ended")
    found = []
    for track, spans in rows_by_track(run.spans).items():
        if track.split()[:1] not in (["controller"], ["rank"], ["engine"]):
            continue
        last = max(spans, key=lambda span: span.end_s)
        shares = _shares(spans, begin_s, newest_s)
        found.append(Activity(track, label_of(last.name), newest_s - last.end_s, shares, states.get(track, otherwise)))
    return found


def processes_html(run: RunFiles, *, is_live: bool = True) -> str:
    """Draw the table; empty without a time line."""
    rows = [_cells(each) for each in activities(run, is_live=is_live)]
    if not rows:
        return ""
    table = table_html(("process", "state", "did last", "ended", f"the last {_RECENT_S:.0f} s"), rows, css="processes")
    return (
        f'<figure class="card wide"><h3>Processes</h3>{table}'
        "<p>From the newest spans of the time line: what each process ended last, how long before the newest span of all, and what it spent"
        " its time on. A rank that has waited at a sync point for long is named by the run itself, in the events.</p></figure>")


def _cells(each: Activity) -> tuple[str, ...]:
    shares = ", ".join(f"{label} {share:.0%}" for label, share in each.shares.items() if share >= 0.005) or "idle"
    return each.track, each.state, each.last, "just now" if each.ended_s < 0.05 else f"{each.ended_s:.1f} s ago", shares


def _shares(spans: Sequence[Span], begin_s: float, end_s: float) -> dict[str, float]:
    spent: dict[str, float] = {}
    for span in spans:
        own = min(span.end_s, end_s) - max(span.start_s, begin_s)
        if own > 0:
            spent[label_of(span.name)] = spent.get(label_of(span.name), 0.0) + own
    whole = max(end_s - begin_s, 1e-9)
    return {label: min(seconds / whole, 1.0) for label, seconds in sorted(spent.items(), key=lambda item: -item[1])}


def _states(run: RunFiles) -> dict[str, str]:
    """Return the state of each engine that ever left service, from the newest event about it."""
    states: dict[str, str] = {}
    for event in run.events:
        engine = str(event.get("engine", ""))
        track = engine if engine.startswith("engine") else f"engine {engine}"
        if event.get("kind") == "quarantine":
            states[track] = f"out of service: {event.get('reason', '')}"
        elif event.get("kind") == "healed":
            states[track] = "in service, healed"
    return states
