"""`report.html` of a run: one file that opens anywhere, with key figures, curves, a timeline, the configuration and the events.

Called by `offbeat report` and at the end of a run. It reads only the files in the run's folder, also during a run and after a crash.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from offbeat.dashboard import timeline
from offbeat.dashboard.answers import answers_html
from offbeat.dashboard.cards import cards_html, episode_cards, evaluation_sets, main_cards
from offbeat.dashboard.evaluations import evaluations_html, models_html, table_html
from offbeat.dashboard.run_files import RunFiles, read_run
from offbeat.dashboard.samples import samples_html
from offbeat.dashboard.warm_up import progress_html, warm_up_html
from offbeat.disk import replacing
from offbeat.errors import StorageError
from offbeat.telemetry.summary import HELDOUT_FELL, proofs_in_words

_FOLDER = Path(__file__).parent
STYLE = (_FOLDER / "style.css").read_text(encoding="utf-8")
CHARTS_SCRIPT = (_FOLDER / "charts.js").read_text(encoding="utf-8")
_TEMPLATE = (_FOLDER / "report.html").read_text(encoding="utf-8")
_MOST_EVENTS = 500
_CELL_PX = 560
_FEW_STEPS = 5
"""Number of steps over which the reward of a run's beginning, and of its end, is averaged."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run's folder, replacing an older one, and return its path.

    Raises DataError if the folder is not a run, StorageError if the report cannot be written.
    """
    page = render_report(read_run(run_dir))
    path = run_dir / "report.html"
    try:
        with replacing(path) as file:
            file.write(page.encode("utf-8", errors="backslashreplace"))  # a damaged file may contain half a surrogate pair
    except OSError as exc:
        raise StorageError(f"cannot write {path}: {exc.strerror}; make the run's folder writable") from exc
    return path


def render_report(run: RunFiles) -> str:
    """Render the report as HTML; parts without data are left out, and a run without metrics says so."""
    return Template(_TEMPLATE).substitute(
        style=STYLE,
        script=CHARTS_SCRIPT,
        name=escape(run.name),
        subtitle=escape(subtitle(run)),
        figures=figures_html(run),
        advice=_advice_html(run),
        charts=_charts_html(run, later="Write the report again then."),
        warm_up=warm_up_html(run),
        evaluations=evaluations_html(run),
        episodes=_episodes_html(run),
        answers=answers_html(run.answers),
        samples=samples_html(run.groups),
        timeline=timeline_html(run),
        details=details_html(run),
    )


def cell_html(run: RunFiles) -> str:
    """Draw key figures, advice, curves and samples as the output of a notebook's cell: in a frame, whose styles stay within it."""
    charts = _charts_html(run, later="Show the run again then.")
    page = (
        f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style><main><dl class="figures">{figures_html(run)}</dl>{_advice_html(run)}'
        f"{answers_html(run.answers)}<section><h2>Curves</h2>{charts}</section>{samples_html(run.groups)}</main>"
        f'<div id="tip" role="status"></div><script>{CHARTS_SCRIPT}\nattachCharts(document);</script>')
    return f'<iframe title="{escape(run.name)}" srcdoc="{escape(page)}" style="width:100%;height:{_CELL_PX}px;border:0"></iframe>'


def overview_html(run: RunFiles) -> str:
    """Draw key figures, advice and curves, or the figures of an evaluation, for the live page."""
    if run.is_evaluation:
        empty = '<p class="empty">No model is evaluated yet. Results appear here with the first one; this page refreshes by itself.</p>'
        return f"<section><h2>Evaluation</h2>{models_html(run) or empty}</section>"
    return (
        f'<dl class="figures">{figures_html(run)}</dl>{_advice_html(run)}{answers_html(run.answers)}'
        f"<section><h2>Curves</h2>{_charts_html(run, later='This page refreshes by itself.')}</section>"
        f"{warm_up_html(run)}{evaluations_html(run)}{_episodes_html(run)}")


def figures_html(run: RunFiles) -> str:
    """Draw the key figures for which there is data."""
    return "".join(
        f'<div class="figure"><dt>{escape(label)}</dt><dd>{escape(value)}</dd><small>{escape(remark)}</small></div>'
        for label, value, remark in _key_figures(run))


def details_html(run: RunFiles) -> str:
    """Draw result, events and configuration as parts that can be opened."""
    return "".join(_details(run))


def subtitle(run: RunFiles) -> str:
    """Name model, task, algorithm, processes and launcher, such as "tiny model · sort_digits · grpo · 2 train ranks, 2 engines · local"."""
    ranks, engines = run.setting("train", "num_ranks"), run.setting("inference", "num_engines")
    parts = [
        run.setting("model", "path") or ("tiny model" if run.config else ""),
        run.setting("data", "task") or run.setting("data", "path"),
        run.setting("algorithm", "preset"),
        f"{_count(ranks, 'train rank')}, {_count(engines, 'engine')}" if ranks and engines else "",
        run.setting("cluster", "launcher"),
    ]
    return " · ".join(str(part) for part in parts if part)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _when(evaluated: Sequence[float], last: float) -> str:
    """Name the steps of the first and last evaluation of a run of `last` steps, e.g. "first → last, after step 40"."""
    where = "before the first step" if evaluated[-1] == 0 else "" if evaluated[-1] == last else f"after step {evaluated[-1]:.0f}"
    if len(evaluated) == 1:
        return where or "after the last step"
    return f"first → last{where and f', {where}'}"


def _key_figures(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    """Yield (label, value, remark) of each figure for which there is data."""
    steps = [row["global_step"] for row in run.metrics if "global_step" in row]
    sets = {"held-out accuracy": "eval/accuracy"} | {f"accuracy on {name}": f"eval/{name}/accuracy" for name in evaluation_sets(run)}
    for label, name in sets.items():
        if found := run.points(name):
            values = [found[0], *found[1:][-1:]]
            yield label, " → ".join(f"{value:.2f}" for _, value in values), _when([step for step, _ in values], max(steps))
    if rewards := run.values("reward/mean"):
        few = max(1, min(_FEW_STEPS, len(rewards) // 2))
        ends = [sum(part) / few for part in (rewards[:few], rewards[-few:])]
        said = f"mean of the first and the last {few} steps" if few > 1 else "of the first step and the last"
        yield "reward", " → ".join(f"{value:.2f}" for value in ends[: len(rewards)]), said if len(rewards) > 1 else "of the only step"
    if steps:
        total = run.setting("run", "total_steps")
        yield "steps", str(max(steps)), f"of {total}" if total else ""
    if seconds := run.values("step/total_s"):
        yield "time in steps", _clock(sum(seconds)), f"{sorted(seconds)[len(seconds) // 2]:.2f} s per step, median"
    if tokens_per_s := run.values("throughput/generated_tokens_per_s"):
        yield "tokens/s", f"{sum(tokens_per_s) / len(tokens_per_s):,.0f}", "generated, mean"
    if used := run.values("train/mfu"):
        yield "MFU", f"{sorted(used)[len(used) // 2]:.0%}", "of the devices' peak in training steps, median"
    if memory := run.values("train/peak_memory_bytes"):
        yield "memory", f"{max(memory) / 2**30:.1f} GiB", "most that a train rank has taken"
    if (share := timeline.overlap(run.spans)) is not None:
        yield "overlap", f"{share:.0%}", "of training time also generates"
    if staleness := run.values("rollout/staleness_max_versions"):
        bound = run.bound("rollout", "max_head_offpolicyness")
        yield "staleness", f"{max(staleness):g}", "largest, versions" + (f"; bound {bound}" if bound is not None else "")
    if gap := run.values("policy/canary_gap"):
        yield "log-prob gap", f"{max(gap):.0e}", "trainer to engine, same weights"
    proofs = run.result.get("proofs") or {}
    if total := sum(proofs.values()):
        yield "weights proven", f"{total - proofs.get('not_proven', 0)} of {total}", proofs_in_words(proofs)


def _advice_html(run: RunFiles) -> str:
    """Draw the advice that the run has recorded, each sentence once."""
    told = dict.fromkeys(str(event.get("text", "")) for event in run.events if event.get("kind") == "advice")
    if not run.result.get("heldout_fell"):
        told.pop(HELDOUT_FELL, None)  # the run was resumed since, and has risen again
    return "".join(f'<p class="advice">{escape(text)}</p>' for text in told)


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _charts_html(run: RunFiles, *, later: str) -> str:
    """Draw the curves, or say when there are some; `later` says how to see them then."""
    cards = cards_html(main_cards(run))
    if not cards:
        return progress_html(run) or f'<p class="empty">No metrics yet. They appear here when the first step has ended. {later}</p>'
    return f'<div class="cards">{cards}</div>'


def _episodes_html(run: RunFiles) -> str:
    shown = cards_html(episode_cards(run))
    return f'<section><h2>Episodes</h2><div class="cards">{shown}</div></section>' if shown else ""


def timeline_html(run: RunFiles) -> str:
    """Draw the time line of the whole run and of a few steps in its middle."""
    if not run.spans:
        return '<p class="empty">No time line was recorded (telemetry.trace is off, or nothing has run yet).</p>'
    share = timeline.overlap(run.spans)
    remark = f" Engines generated during {share:.0%} of the training time." if share is not None else ""
    start_s = min(span.start_s for span in run.spans)
    low, high = (t - start_s for t in timeline.middle_window(run.spans))
    return (
        f'<figure class="card wide"><h3>Whole run</h3><div class="keys">{timeline.legend(run.spans)}</div>'
        f"{timeline.draw_whole(run.spans)}<p>What each process was doing.{remark}</p></figure>"
        f'<figure class="card wide"><h3>A few steps <small>{low:.1f} s to {high:.1f} s, the framed part above</small></h3>'
        f"{timeline.draw_window(run.spans)}<p>Each line begins a step. Point at a bar to see what it was and how long it took; "
        "<code>trace.json</code> opens in ui.perfetto.dev for more.</p></figure>"
    )


def _details(run: RunFiles) -> Iterator[str]:
    """Yield the collapsible parts of the page."""
    if run.result:
        rows = [(name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for name, value in run.result.items()]
        yield _collapsible("Result", table_html(("figure", "value"), rows, css="details"))
    if run.events:
        start_s = _start_s(run)
        rows = [(f"{event.get('time_s', start_s) - start_s:.1f} s", str(event.get("kind", "")), _fields(event)) for event in run.events]
        left_out = f"<p>The last {_MOST_EVENTS} of {len(rows)}.</p>" if len(rows) > _MOST_EVENTS else ""
        yield _collapsible(f"Events ({len(rows)})", left_out + table_html(("time", "what", "details"), rows[-_MOST_EVENTS:], css="details"))
    if run.config_text:
        yield _collapsible("Configuration", f"<pre>{escape(run.config_text)}</pre>")


def _start_s(run: RunFiles) -> float:
    times = [row["time_s"] for row in (*run.events, *run.metrics) if "time_s" in row] + [span.start_s for span in run.spans]
    return min(times, default=0.0)


def _fields(event: Mapping[str, Any]) -> str:
    return "  ".join(f"{name}={_short(value)}" for name, value in event.items() if name not in ("time_s", "kind"))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _collapsible(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"
