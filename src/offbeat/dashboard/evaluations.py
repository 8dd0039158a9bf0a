"""Tables of evaluations, with 95 % intervals where there are some. Drawn by the report and the live page.

A run has a table of each figure's first, highest and last value; a folder of `offbeat eval` one of each model's figures.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from html import escape
from itertools import chain, repeat

from offbeat.dashboard.run_files import RunFiles, numbers

_METRIC = re.compile(r"eval/(.+)")
_END = re.compile(r"(.+)_(?:low|high)")
_NOT_SHOWN = ("failed_prompts", "/prompts")


@dataclass(frozen=True)
class Figure:
    """One figure of one set of held-out prompts.

    Attributes:
        values: values by global step, in the order of steps.
        ends: ends of the interval, such as (0.47, 0.55), by global step; a step without an interval is left out.
    """

    name: str
    values: dict[int, float]
    ends: dict[int, tuple[float, float]]

    @property
    def title(self) -> str:
        """The displayed name, such as "maths: pass@4" for "maths/pass_at_4"."""
        return self.name.replace("pass_at_", "pass@").replace("_", " ").replace("/", ": ")

    def at(self, step: int) -> str:
        """Write the value after a step, such as "0.512 (0.47 to 0.55)"."""
        ends = self.ends.get(step)
        return f"{self.values[step]:.3g}" + (f" ({ends[0]:.3g} to {ends[1]:.3g})" if ends else "")


def figures_of(run: RunFiles) -> list[Figure]:
    """Return the figures of all evaluations, in the order of `metrics.jsonl`; ends of intervals and numbers of prompts are no figures."""
    names = dict.fromkeys(name for row in run.metrics for name in row if _METRIC.fullmatch(name) and not name.endswith(_NOT_SHOWN))
    found = []
    for name in names:
        end = _END.fullmatch(name)
        if end is not None and end[1] in names:
            continue
        values, low, high = ({int(step): value for step, value in run.points(f"{name}{which}")} for which in ("", "_low", "_high"))
        if values:
            ends = {step: (low[step], high[step]) for step in values if step in low and step in high}
            found.append(Figure(name.removeprefix("eval/"), values, ends))
    return found


def evaluations_html(run: RunFiles) -> str:
    """Draw the table; empty for a run with fewer than two figures, since a single one is drawn as a curve."""
    figures = figures_of(run)
    if len(figures) < 2:
        return ""
    return f"<section><h2>Evaluations</h2>{_table(('figure', 'first', 'highest', 'last'), map(_cells, figures))}</section>"


def models_html(run: RunFiles) -> str:
    """Draw the figures of each model of an `offbeat eval`; empty for a run, and before the first model is evaluated."""
    models = run.evaluation.get("models")
    rows = [(str(model.get("model", "")), model["metrics"]) for model in models if isinstance(model, dict) and isinstance(
        model.get("metrics"), dict)] if isinstance(models, list) else []
    found = [(name, replace(run, metrics=[{"global_step": 0} | numbers(metrics)])) for name, metrics in rows]
    cells = [
        (cell, figure.title, figure.at(0))
        for name, each in found for cell, figure in zip(chain([name], repeat("")), figures_of(each), strict=False)]
    return _table(("model", "figure", "value"), cells) if cells else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    table = table_html(head, rows, css="evaluations")
    return (
        f'<figure class="card wide">{table}<p>Of held-out prompts, and of sets by their names; in brackets 95 % intervals.</p></figure>')


def table_html(head: Iterable[str], rows: Iterable[Iterable[str]], *, css: str) -> str:
    """Draw a table of texts."""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="{css}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'


def _cells(figure: Figure) -> Iterator[str]:
    steps = sorted(figure.values)
    highest = max(steps, key=lambda step: figure.values[step])
    yield figure.title
    for step in (steps[0], highest, steps[-1]):
        yield f"{figure.at(step)}, step {step}"
