"""The supervised warm-up of a run, from its events: how far it is, and its curves. Drawn by the report and the live page.

A warm-up has no rows in `metrics.jsonl`, which begins with reinforcement learning.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

from offbeat.dashboard.cards import cards_html
from offbeat.dashboard.charts import Chart, Series
from offbeat.dashboard.run_files import RunFiles

STEP_EVENT = "sft_step"
"""Kind of the event of each supervised step."""
_ACCURACY = "eval/accuracy"
_EARLIER_S = 0.01
"""A warm-up is over this long before the first row of metrics; `offbeat sft` writes its first row before its first event."""

Steps = Mapping[int, Mapping[str, Any]]


def warm_up_steps(run: RunFiles) -> Steps:
    """Return the events of a run's warm-up by step, none for a run without one; steps that a resumed run has repeated count once."""
    first_s = next((row["time_s"] for row in run.metrics if "time_s" in row), None) if run.metrics else float("inf")
    if first_s is None:
        return {}
    events = [event for event in run.events if event.get("kind") == STEP_EVENT and event["time_s"] + _EARLIER_S < first_s]
    return {event["step"]: event for event in events if isinstance(event.get("step"), int)}


def warm_up_html(run: RunFiles) -> str:
    """Draw the curves of the warm-up; empty for a run without one."""
    steps = warm_up_steps(run)
    cards = cards_html([
        (Chart("Loss of the warm-up", "nats", [Series("loss", _points(steps, "train/loss"))], y_range=(0, None)),
         "Per token of the answers that are imitated, by supervised steps."),
        (Chart("Held-out accuracy of the warm-up", "", [Series("accuracy", _points(steps, _ACCURACY), style="dots")], y_range=(0, 1)),
         "On prompts that are never trained on, by supervised steps.")])
    return f'<section><h2>Supervised warm-up</h2><div class="cards">{cards}</div></section>' if cards else ""


def progress_html(run: RunFiles) -> str:
    """Say how far the warm-up is; empty if reinforcement learning has begun, or nothing has."""
    steps = warm_up_steps(run)
    if run.metrics or not steps:
        return ""
    most, enough = run.bound("sft", "total_steps"), run.bound("sft", "stop_at_accuracy")
    found = _points(steps, _ACCURACY)
    said = f"Warming up by supervised training: step {max(steps)}" + (f" of at most {most:g}" if most is not None else "")
    if found:
        said += f", held-out accuracy {found[-1][1]:.3f} after step {found[-1][0]:g}"
    if enough is not None and enough < 1:
        said += f". The warm-up ends at an accuracy of {enough:g}"
    return f'<p class="empty">{escape(said)}. The curves of reinforcement learning appear above these when its first step has ended.</p>'


def _points(steps: Steps, name: str) -> list[tuple[float, float]]:
    values = ((step, event.get(name)) for step, event in sorted(steps.items()))
    return [(float(step), float(value)) for step, value in values if isinstance(value, int | float)]
