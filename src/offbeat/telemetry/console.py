"""Shows the progress of a run: a live table on a terminal, otherwise one aligned line per step, or JSON lines for programs.

The controller calls `start`, then `update` once per step and `note` in between, then `finish`. A missing metric is shown as "-".
"""

import json
import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

Mode = Literal["live", "plain", "json", "quiet"]

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 24
_HELD_OUT = "eval/accuracy"


def choose_mode(stream: TextIO, *, as_json: bool = False, enabled: bool = True) -> Mode:
    """Return "json" if requested, "quiet" if turned off, "live" on a terminal, else "plain"."""
    if as_json:
        return "json"
    if not enabled:
        return "quiet"
    return "live" if stream.isatty() else "plain"


class Console:
    """Shows one run. Use as a context manager, so that an interrupted run leaves the terminal in order."""

    def __init__(self, mode: Mode, *, stream: TextIO | None = None) -> None:
        """Show the run on `stream`, by default stdout."""
        self._mode = mode
        self._stream = stream if stream is not None else sys.stdout
        self._rich = RichConsole(file=self._stream, highlight=False)
        self._history: dict[str, deque[float]] = {}
        self._total_steps = 0
        self._title = ""
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("·"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._rich,
            expand=True,
        )

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, title: str, total_steps: int) -> None:
        """Begin to show a run, or its next part, with a title and a number of steps."""
        self.close()
        self._title, self._total_steps = title, total_steps
        if self._mode == "json":
            self._print_json("start", title=title, total_steps=total_steps)
        elif self._mode == "plain":
            print(title, file=self._stream, flush=True)
        elif self._mode == "live":
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._history.clear()
            self._progress.add_task("steps", total=total_steps)
            self._live = Live(self._view({}), console=self._rich, refresh_per_second=4)
            self._live.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a completed step; `step` counts from 1."""
        if self._mode == "json":
            self._print_json("step", step=step, metrics={name: _json_number(value) for name, value in metrics.items()})
        elif self._mode == "plain":
            print(plain_line(step, self._total_steps, metrics), file=self._stream, flush=True)
        elif self._live is not None:
            for name in ("reward/mean", _HELD_OUT):
                if math.isfinite(metrics.get(name, math.nan)):
                    self._history.setdefault(name, deque(maxlen=_HISTORY)).append(metrics[name])
            self._progress.update(self._progress.task_ids[0], completed=step)
            self._live.update(self._view(metrics))

    def note(self, text: str) -> None:
        """Show one permanent line, such as "checkpoint saved"."""
        if self._mode == "json":
            self._print_json("note", text=text)
        elif self._mode == "plain":
            print(f"  {text}", file=self._stream, flush=True)
        elif self._mode == "live":
            self._rich.print(Text(f"  {text}", style="dim"))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Stop the live display and show the result of the run, one line per entry."""
        self.close()
        if self._mode == "json":
            self._print_json("finish", **summary)
        elif self._mode in ("plain", "live"):
            width = max((len(name) for name in summary), default=0)
            for name, value in summary.items():
                shown = f"{value:.4g}" if isinstance(value, float) else str(value)
                self._rich.print(Text(f"  {name:<{width}}  ", style="dim").append(shown, style="not dim bold"), soft_wrap=True)

    def close(self) -> None:
        """Stop the live display where it stands; may be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_json(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}, ensure_ascii=False, default=str), file=self._stream, flush=True)

    def _view(self, metrics: Mapping[str, float]) -> RenderableType:
        """Return the live display: title, progress, and two columns of figures."""
        shown = dict(metrics)
        if self._history.get(_HELD_OUT):
            shown[_HELD_OUT] = self._history[_HELD_OUT][-1]  # evaluated every few steps; the last value is shown until the next
        values = _figures(shown)
        table = Table.grid(padding=(0, 2))
        for style in ("dim", "bold", "cyan", "dim", "bold"):
            table.add_column(style=style)
        left = [("reward", "reward/mean"), ("held-out", _HELD_OUT), ("tokens/s", ""), ("s/step", ""), ("memory", "")]
        right = ["staleness", "log-prob gap", "loss", "grad norm", "MFU"]
        for (label, history), other in zip(left, right, strict=True):
            table.add_row(label, values[label], sparkline(self._history.get(history, ())), other, values[other])
        return Group(Rule(Text(self._title, style="bold"), align="left", style="cyan"), self._progress, table)


def plain_line(step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    """Format one step as a line whose columns align with the previous line's."""
    widths = {"reward": 6, "held-out": 6, "staleness": 6, "tokens/s": 6, "log-prob gap": 15, "loss": 8, "grad norm": 6, "s/step": 5}
    short = {"staleness": "stale", "tokens/s": "tok/s", "log-prob gap": "gap", "grad norm": "grad"}
    figures = _figures(metrics, between="/")
    if "train/mfu" in metrics:  # of devices whose peak is known
        widths["MFU"] = 4
    columns = (f"{short.get(label, label)} {figures[label]:<{width}}" for label, width in widths.items())
    return f"step {step:>{len(str(total_steps))}}/{total_steps}  {'  '.join(columns)}".rstrip()


def sparkline(values: Sequence[float]) -> str:
    """Draw values as bars of eight heights, the lowest value as the lowest bar; constant values are drawn in the middle."""
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


def _figures(metrics: Mapping[str, float], *, between: str = " max ") -> dict[str, str]:
    """Return the figures shown for a step, by label; `between` separates a mean from its maximum."""
    get = metrics.get
    total_s, wait_s = get("step/total_s"), get("step/rollout_wait_s")
    mfu, memory = get("train/mfu"), get("train/peak_memory_bytes")
    waiting = f" ({wait_s / total_s:.0%} wait)" if total_s and wait_s is not None else ""
    return {
        "reward": compact(get("reward/mean")),
        "held-out": compact(get(_HELD_OUT)),
        "staleness": between.join((compact(get("rollout/staleness_mean_versions"), 2), compact(get("rollout/staleness_max_versions")))),
        "tokens/s": compact(get("throughput/generated_tokens_per_s")),
        "log-prob gap": between.join((compact(get("policy/logprob_gap_mean")), compact(get("policy/logprob_gap_max")))),
        "loss": compact(get("train/loss"), 4),
        "grad norm": compact(get("train/grad_norm")),
        "s/step": compact(total_s, 2) + waiting,
        "memory": "-" if memory is None else f"{memory / 2**30:.1f} GiB peak",
        "MFU": "-" if mfu is None else f"{mfu:.0%}",
    }


def _json_number(value: float) -> float | None:
    return value if isinstance(value, int) else float(value) if math.isfinite(value) else None
