"""Shows the progress of a run: a live table on a terminal, otherwise one aligned line per step, or JSON lines for programs.

In a notebook the lines are one output of the cell, which keeps the newest steps.

The controller calls `open` as soon as there is something to say, `start` before the first step, then `update` once per step and `note` in
between, then `show_result`. On a terminal, the last line always shows the phase of the process, and whom it waits for, from the phases
that are announced with `offbeat.phase`. A missing metric is shown as "-".
"""

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from offbeat.errors import describe
from offbeat.phase import marks
from offbeat.telemetry.notebook import CellOutput, is_notebook
from offbeat.telemetry.pace import Pace, duration, short_duration
from offbeat.telemetry.streams import tolerant
from offbeat.telemetry.summary import UNPROVEN, in_words
from offbeat.user_code.boundary import Caught

MakeSamples = Callable[[], str]
"""Makes the text of some samples, when it is asked for."""

OnOpen = Callable[["Console"], object]

Mode = Literal["live", "plain", "notebook", "json", "quiet"]

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 24
_HELD_OUT = "eval/accuracy"
_STALENESS = "rollout/staleness_mean_versions"
_LEGEND = {
    "stale": "age in versions of the weights that sampled a token; mean and max",
    "gap": "log-probability of a token, trainer vs. engine; mean and max",
}
"""Explanations of a step's figures, in words that fit a narrow terminal; shown once. Plain lines show only the maximum."""
_PLAIN = {
    "reward": ("reward/mean", 5), "stale": ("rollout/staleness_max_versions", 1), "gap": ("policy/logprob_gap_max", 7),
    "loss": ("train/loss", 8), "s/step": ("step/total_s", 13)}
"""Columns of a step's line: label, metric and width in characters."""
_LINE = 100
"""Largest width of a step's line, in characters; a longer one leaves out the remaining time."""
_SHARES = {"wait": "step/rollout_wait_s", "eval": "step/evaluate_s"}
"""Parts of a step's seconds that are shown as shares, where they are measured."""
_BESIDE_SPARKLINES = 64
"""Columns of the live table without its sparklines."""
_SPANS = {
    "rollout": "waiting for rollouts", "advantage": "computing advantages", "score": "scoring samples", "train": "training",
    "publish": "publishing the weights", "evaluate": "evaluating", "checkpoint": "saving a checkpoint"}
"""Words for phases that are spans of the time line."""


def choose_mode(stream: TextIO | None, *, as_json: bool = False, enabled: bool = True) -> Mode:
    """Return "json" if requested, "quiet" if turned off, "live" on a terminal, "notebook" in a notebook, else "plain"."""
    if as_json:
        return "json"
    if not enabled or stream is None:  # a service may have closed it
        return "quiet"
    return "live" if stream.isatty() else "notebook" if is_notebook(stream) else "plain"


class Console:
    """Shows one run. Use as a context manager, so that an interrupted run leaves the terminal in order."""

    def __init__(self, mode: Mode, *, stream: TextIO | None = None, on_open: "OnOpen | None" = None) -> None:
        """Show the run on `stream`, by default stdout. A stream that cannot be written, or is not read any more, does not end the run.

        `on_open` is called with this console each time it is opened, when the run's folder is there.
        """
        self._mode = mode
        self._on_open = on_open
        self._stream = tolerant(stream if stream is not None else sys.stdout)
        self._rich = RichConsole(file=self._stream, highlight=False, force_jupyter=False)
        self._cell = CellOutput()
        self._history: dict[str, deque[float]] = {}
        self._metrics: Mapping[str, float] = {}
        self._known: set[str] = set()
        self._pace = Pace(0)
        self._total_steps = 0
        self._title = ""
        self._live: Live | None = None
        self._explained = self._hinted = False
        self._samples: MakeSamples | None = None
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(), TextColumn("· {task.fields[left]}"), console=self._rich,
            expand=True,
        )

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hint(self, text: str) -> None:
        """Show `text` on a terminal until something else is shown."""
        if self._mode == "live" and self._live is None:
            self._clear_hint()
            self._stream.write(text)
            self._stream.flush()
            self._hinted = True

    def open(self, title: str) -> None:
        """Show the current phase on a terminal, from now on; `title` names the run."""
        if self._mode == "live":
            self._title = title
            self._go_live()
        if self._on_open is not None:
            self._on_open(self)

    def start(self, title: str, total_steps: int) -> None:
        """Begin to show a run, or its next part, with a title and a number of steps."""
        if self._progress.task_ids:
            self.close()
        self._title, self._total_steps, self._metrics, self._pace = title, total_steps, {}, Pace(total_steps)
        self._known = set()
        if self._mode == "json":
            self._print_json("start", title=title, total_steps=total_steps)
        elif self._mode in ("plain", "notebook"):
            self._say(title)
        elif self._mode == "live":
            self._history.clear()
            self._progress.add_task("steps", total=total_steps, left="")
            self._go_live()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a completed step; `step` counts from 1."""
        self._pace.step(step)
        if self._mode == "json":
            self._print_json("step", step=step, metrics={name: _json_number(value) for name, value in metrics.items()})
        elif self._mode in ("plain", "notebook"):
            if _STALENESS in metrics and not self._explained:
                self._explained = True
                for name, meaning in _LEGEND.items():
                    self._say(f"  {name}: {meaning.replace('mean and max', 'the largest')}")
            self._known |= metrics.keys()  # a column that was there once stays, so that columns align
            self._say(plain_line(step, self._total_steps, metrics, known=self._known, left_s=self._pace.left_s), passing=True)
        elif self._live is not None:
            for name in ("reward/mean", _HELD_OUT):
                if math.isfinite(metrics.get(name, math.nan)):
                    self._history.setdefault(name, deque(maxlen=_HISTORY)).append(metrics[name])
            left_s = self._pace.left_s
            self._progress.update(
                self._progress.task_ids[0], completed=step, left="" if left_s is None else f"about {duration(left_s)} left")
            self._metrics = metrics
            self._live.refresh()

    def note(self, text: str) -> None:
        """Show one permanent line, such as "checkpoint saved"."""
        if self._mode == "json":
            self._print_json("note", text=text)
        elif self._mode in ("plain", "notebook"):
            self._say(f"  {text}")
        elif self._mode == "live":
            self._clear_hint()
            self._rich.print(Text(f"  {text}", style="dim"))
            if self._live is not None:
                self._live.refresh()

    def starting(self, text: str) -> None:
        """Say what is started now, and may take a minute, where nothing shows the current phase as a terminal does."""
        if self._mode in ("plain", "notebook"):
            self._say(f"  {text}")

    def announce(self, text: str) -> None:
        """Show one permanent line that the user has asked for, also where the run shows nothing else. May be called on any thread."""
        if self._mode == "quiet":
            print(text, file=self._stream, flush=True)
        else:
            self.note(text)

    def offer(self, samples: MakeSamples) -> None:
        """Offer samples, to be shown when the user asks for them; `samples` writes their lines then."""
        self._samples = samples

    def show_samples(self) -> None:
        """Show the samples that were offered last."""
        text = "no step is done yet, so there are no samples to show"
        with Caught() as caught:  # a person who is curious must not end a run
            text = self._samples() if self._samples is not None else text
        if caught.error is not None:
            text = f"the samples cannot be shown: {describe(caught.error)}"
        for line in text.splitlines():
            self.note(line)

    def show_result(self, summary: Mapping[str, Any]) -> None:
        """Stop the live display and show the result of the run, one line per entry; programs get the names of `result.json`."""
        self.close()
        if self._mode == "json":
            self._print_json("finish", **summary)
        elif self._mode != "quiet":
            lines = list(in_words(summary))
            width = max((len(name) for name, _ in lines), default=0)
            if self._mode == "notebook":
                self._say("\n".join(f"  {name:<{width}}  {shown}" for name, shown in lines))
                return
            for name, shown in lines:
                style = "not dim bold red" if UNPROVEN.format("") in shown else "not dim bold"
                self._rich.print(Text(f"  {name:<{width}}  ", style="dim").append(shown, style=style), soft_wrap=True)

    def close(self) -> None:
        """Stop the live display where it stands; may be called twice."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
        self._clear_hint()
        self._cell.flush()

    def _say(self, line: str, *, passing: bool = False) -> None:
        """Show a line where there is no live display; in a notebook, one that is `passing` makes way for later ones."""
        if self._mode == "notebook":
            self._cell.add(line, passing=passing)
        else:
            print(line, file=self._stream, flush=True)

    def _print_json(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}, ensure_ascii=False, default=str), file=self._stream, flush=True)

    def _clear_hint(self) -> None:
        if self._hinted:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._hinted = False

    def _go_live(self) -> None:
        self._clear_hint()
        if self._live is None:
            self._live = Live(get_renderable=self._view, console=self._rich, refresh_per_second=4)
            self._live.start(refresh=True)
        else:
            self._live.refresh()

    def _view(self) -> RenderableType:
        """Return the live display: title, progress, two columns of explained figures, and the phase. The display's thread calls it, too."""
        title = Rule(Text(self._title, style="bold"), align="left", style="cyan")
        now = [Text(f"now  {doing()}", style="dim", no_wrap=True, overflow="ellipsis")] if self._live is not None else []
        if not self._progress.task_ids:
            return Group(title, *now)
        shown = dict(self._metrics)
        if self._history.get(_HELD_OUT):
            shown[_HELD_OUT] = self._history[_HELD_OUT][-1]  # evaluated every few steps; the last value is shown until the next
        values = _figures(shown)
        table = Table.grid(padding=(0, 2))
        for style in ("dim", "bold", "cyan", "dim", "bold"):
            table.add_column(style=style)
        left = [("reward", "reward/mean"), ("held-out", _HELD_OUT), ("tokens/s", ""), ("s/step", "")]
        right = ["staleness", "log-prob gap", "loss", "grad norm"]
        newest = max(min(self._rich.width - _BESIDE_SPARKLINES, _HISTORY), 1)
        for (label, history), other in zip(left, right, strict=True):
            table.add_row(label, values[label], sparkline(tuple(self._history.get(history, ()))[-newest:]), other, values[other])
        known = [label for label, metric in (("memory", "train/peak_memory_bytes"), ("MFU", "train/mfu")) if metric in shown]
        if known:  # MFU is known for devices with a known peak only
            first, second = (*known, "")[:2]
            table.add_row(first, values[first], "", second, values.get(second, ""))
        if _STALENESS in shown:
            self._explained = True
        legend = [
            Text(f"{name}: {meaning}", style="dim")
            for name, meaning in zip(("staleness", "log-prob gap"), _LEGEND.values(), strict=True)] if self._explained else []
        if now and self._samples is not None:
            now.append(Text(f"kill -USR1 {os.getpid()} shows the best and the worst sample of the last step", style="dim", no_wrap=True))
        return Group(title, self._progress, table, *legend, *now)


def doing() -> str:
    """Return the current phase, the awaited peers and the duration, such as "training (42 s)"; "" if no phase was announced."""
    said, seconds = doing_since()
    return f"{said} ({duration(seconds)})" if said else ""


def doing_since() -> tuple[str, float]:
    """Return the current phase with the awaited peers, and its seconds, such as ("training", 42.0); "" and 0 if none was announced."""
    entered = marks()
    waits = [mark for mark in entered if mark.describe is not None] or entered[-1:]
    if not waits:
        return "", 0.0
    return " · ".join(dict.fromkeys(_SPANS.get(mark.text, mark.text) for mark in waits)), time.monotonic() - waits[-1].since_s


def plain_line(
    step: int, total_steps: int, metrics: Mapping[str, float], *, known: Set[str] = frozenset(), left_s: float | None = None,
) -> str:
    """Format one step as a line whose columns align with the previous line's and whose end is the remaining time.

    A column without a metric in this step, or in `known`, those of earlier steps, is left out.
    """
    total_s = metrics.get("step/total_s")
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for label, (name, width) in _PLAIN.items():
        if name in metrics or name in known:
            shown = compact(metrics.get(name), 2 if label == "s/step" else 3)
            if label == "s/step" and total_s:
                shown += "".join(f" {metrics[of] / total_s:.0%} {part}" for part, of in _SHARES.items() if of in metrics)
            parts.append(f"{label} {shown:<{width}}")
    left = f"  left {short_duration(left_s)}" if left_s is not None and step < total_steps else ""
    line = "  ".join(parts).rstrip() + left
    return line if len(line) <= _LINE else line.removesuffix(left)


def sparkline(values: Sequence[float]) -> str:
    """Draw values as bars of eight heights, e.g. [0, 7, 3] as "▁█▄"; constant values are drawn in the middle."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return _BARS[3] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


def compact(value: float | None, digits: int = 3) -> str:
    """Format a number in few characters, such as 0.512, 12.3k or 1.2e-05; "-" for None, NaN and infinities."""
    if value is None or not math.isfinite(value):
        return "-"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    if value == 0 or float(value).is_integer():
        return f"{value:.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.0f}"


def _figures(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the figures that the live table shows for a step, by label."""
    get, between = metrics.get, " max "
    total_s = get("step/total_s")
    mfu, memory = get("train/mfu"), get("train/peak_memory_bytes")
    shares = ", ".join(f"{metrics[name] / total_s:.0%} {part}" for part, name in _SHARES.items() if total_s and name in metrics)
    return {
        "reward": compact(get("reward/mean")),
        "held-out": compact(get(_HELD_OUT)),
        "staleness": between.join((compact(get("rollout/staleness_mean_versions"), 2), compact(get("rollout/staleness_max_versions")))),
        "tokens/s": compact(get("throughput/generated_tokens_per_s")),
        "log-prob gap": between.join((compact(get("policy/logprob_gap_mean")), compact(get("policy/logprob_gap_max")))),
        "loss": compact(get("train/loss"), 4),
        "grad norm": compact(get("train/grad_norm")),
        "s/step": compact(total_s, 2) + (f" ({shares})" if shares else ""),
        "memory": "-" if memory is None else f"{memory / 2**30:.1f} GiB peak",
        "MFU": "-" if mfu is None else f"{mfu:.0%}",
    }


def _json_number(value: float) -> float | None:
    return value if isinstance(value, int) else float(value) if math.isfinite(value) else None
