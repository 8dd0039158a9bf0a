"""The fault table as a document. Pure; called by `table.py`."""

from collections.abc import Sequence

from faults.drill import GRACE_S, Outcome
from faults.points import ANSWER_TIMEOUT_S, JOIN_TIMEOUT_S, MODES, SYNC_TIMEOUT_S, WRITE_TIMEOUT_S, all_drills

_MAX_NAMED = 220
_HEAD = f"""\
# Faults

What a run does when one of its ranks misbehaves, at every named sync point and at every place inside the regions, in every mode.
`make faults` measures it and writes this file from `build/faults.jsonl`; it takes about an hour and a half on two cores, and goes on where
it was interrupted. Below are [damaged files](#damaged-files), [changed settings](#changed-settings) and
[wrong user code](#wrong-user-code).

Each row is a real `offbeat train` of a tiny model on two ranks, with one engine and a reward process; `spmd` is under `torchrun`, `local`
and `ray` under a controller. `OFFBEAT_FAULT` lets one rank misbehave at one point or place:

| fault | what the rank does |
|---|---|
| exception | raises |
| slow | sleeps for an hour |
| stop | sends itself SIGSTOP |
| kill | sends itself SIGKILL |
| mismatch | comes under another name |
| hang | sleeps for an hour, at a place inside a region or a call |

Places are where a rank does its work once all have come: the forward and the backward pass and the optimizer's step, copying, writing and
offering weights, writing and reading checkpoints, loading the model. The other rank sits in a collective of torch's then, or has nothing to
do. It is the rank that is stopped or hangs that must be named, after `dist.sync_timeout_s`, and never the other one; `python
tests/faults/random_stops.py` does the same at random moments.

A row passes when

- the other rank and the last lines of the command name the rank, the point and the cause, within the deadline and {GRACE_S:g} s;
- the exit code is 1, under `torchrun` its own;
- no process of the run is there {GRACE_S:g} s after the command's end: no rank, engine or reward process, nothing of Ray;
- the run resumes: a later command continues from the newest checkpoint.

The deadlines of these runs are short: {SYNC_TIMEOUT_S:g} s at a point, {JOIN_TIMEOUT_S:g} s at `join`, and {WRITE_TIMEOUT_S:g} s where
rank 0 writes files meanwhile; a rank has {ANSWER_TIMEOUT_S:g} s to say where it is. Only a rank that is slow or stopped has to be waited
for that long: a rank that fails, dies or comes under another name is known at once. At `engines` the wait for rank 1 begins when rank 0
has started them, for which it gets 4 s.

*Named after* counts from the moment at which the rank misbehaves to the other rank's verdict, and *told after* to the command's sentence on
the terminal, which comes when its processes have ended; both in seconds, *deadline* included. *What was named* is the first line of what
the command says, without process ids and durations. In `ray` and `local` mode a rank may collect no more than that another is gone, when
the process that started that one was faster; that one then says how it died. Where a killed rank was not waited for at its point, the
others say how far they had come.
"""


def render(outcomes: Sequence[Outcome]) -> str:
    """The whole document."""
    parts = [_HEAD, _summary(outcomes)]
    for mode in MODES:
        rows = [outcome for outcome in outcomes if outcome.mode == mode]
        if rows:
            parts.append(f"## {mode}\n\n" + _table(rows))
    return "\n".join(parts)


def _summary(outcomes: Sequence[Outcome]) -> str:
    failed = [outcome for outcome in outcomes if outcome.problems]
    total = len(all_drills())
    lines = [f"{len(outcomes) - len(failed)} of {total} rows pass" + (", and not all were run.\n" if len(outcomes) < total else ".\n")]
    waited = [outcome for outcome in outcomes if outcome.named_s is not None and outcome.told_s is not None]
    lines += ["| mode | rows | named after the deadline: median, most (s) | told after the deadline |", "|---|---|---|---|"]
    for mode in MODES:
        rows = [outcome for outcome in waited if outcome.mode == mode]
        if rows:
            named = sorted(outcome.named_s - outcome.deadline_s for outcome in rows if outcome.named_s is not None)
            told = sorted(outcome.told_s - outcome.deadline_s for outcome in rows if outcome.told_s is not None)
            lines.append(f"| {mode} | {len(rows)} | {_spread(named)} | {_spread(told)} |")
    if failed:
        lines += ["", "Rows that do not pass:", "", *(
            f"- {each.mode}, rank {each.rank}, {each.kind} at `{each.point}`: {'; '.join(each.problems)}" for each in failed)]
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    return f"{max(values[len(values) // 2], 0):.2f}, {max(values[-1], 0):.2f}"


def _table(rows: Sequence[Outcome]) -> str:
    lines = [
        "| point | rank | fault | named after | told after | deadline | what was named | by | exit code | processes left | resumed |",
        "|---|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        named = row.named if len(row.named) <= _MAX_NAMED else row.named[: _MAX_NAMED - 1] + "…"
        cells = (
            f"`{row.point}`", row.rank, row.kind, _seconds(row.named_s), _seconds(row.told_s), f"{row.deadline_s:g}",
            named.replace("|", "\\|"), ", ".join(row.named_by) or "nobody", row.exit_code, row.left, "yes" if row.resumed else "no")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"
