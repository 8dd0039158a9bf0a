"""The page docs/chaos.md, from the kills. Pure; called by `run.py`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chaos.run import Row

_PROMISES = {
    "lost": "finished groups, drawn prompts, steps and stored rollouts that are lost",
    "doubled": "groups that were trained on twice, or in another step than before",
    "tokens": "finished groups with other tokens or versions than before",
    "versions": "tokens with versions that are out of order, older than their group's admission, or beyond the bound on staleness",
    "processes": "processes that are there 15 s after the command's end",
    "files": "files left: parts without a name, memory that processes share, versions and checkpoints beyond those that are kept",
    "replay": "runs whose [replay](replay.md), from the first step to the last, differs from what they recorded",
    "other": "commands that neither went on nor ended, and runs that did not come to their end"}
_MODES = {
    "local": "a controller, two train ranks, two engines, two reward processes",
    "lora": "an adapter, one train rank, one engine", "spmd": "two ranks under `torchrun`; the first draws data for both",
    "spmd, all draw": "two ranks under `torchrun`, each with data and a journal of its own",
    "agents": "episodes of two turns in two processes of the user's code", "ray": "workers are Ray's actors"}
_MOMENTS = {
    "start-up": "up to 6 s after the command was started", "any time": "up to 1.5 s after a step",
    "publish": "the folder of the next version has appeared", "save": "the folder of a checkpoint is there, and not complete",
    "evaluation": "the step before an evaluation is stored, and its row of metrics is not written",
    "rename": "a file has been begun that gets its name when it is whole"}
_HEAD = """\
# Chaos

What is left of a run whose processes are killed, again and again, at bad moments. `make chaos` measures it and writes this page: it kills
200 times, two runs side by side, and goes on where it was interrupted. The kills are drawn from a seed.

A run that dies is started again with the same command, and goes on from its checkpoint and its [journal](journal.md). After every
kill that ends a command, each prompt that was ever drawn must be in exactly one place: trained on in one step, finished and on hand,
waiting to be answered, or rejected with a reason. What was finished must have the same tokens for ever, and what was trained on must stay
in its step. After ten kills or fewer a run does three more steps and must end well. All of its steps are then [replayed](replay.md), and
must give the same metrics and weights, bit for bit.

All kills are SIGKILL, which no program can prepare for. *The command* is every process of a run at once, as a batch system or a power
switch does it; *the controller* is the process that was started, whose workers must then end by themselves. A dead *rank* ends the run
with an error. An *engine*, a *reward process* or a process of *agents* is replaced while the run goes on.
"""

_FOLDERS = re.compile(r"(?:/[\w.,~-]+)+/")
"""Beginnings of paths, which say nothing to a reader."""

_EARLIER = """\
## What earlier sittings found

In the last one, ranks under `torchrun` that were starting outlived it by minutes: they waited for the store that it had served. They end at
once now.

In the first one 153 of 162 kills were as promised; their records are lost. What was not has been mended since. As the records could not be
asked again, causes were found by reading, and a test shows each:

- Four times the account was wrong: rollouts of steps that the next start redoes are stored then.
- Twice the journal of a run of agents could not be read to its end. An error between the training of a step and its record, as of a rank
  that dies in a publish, let the journal begin anew at a step that it did not have. The step is now recorded before the run ends.
- Twice processes of Ray outlived a kill. Ray's agents erase their environment, by which the account found what to kill. Where the
  controller is killed while Ray starts, the run did not know of them either; now it does.
- Twice one folder of weights too many was left: one that a version on its way had kept, or the last requests of an adapter.

In the second one a command ended by itself before it was to be killed, which is not counted: under a load of 30 its only engine had not
healed within `inference.heal_timeout_s`, 120 s.
"""


def document(rows: Sequence[Row], *, wanted: int, before: Sequence[Row] = ()) -> str:
    """Write the page; `before` are rows of runs that have been done again since, after a mend."""
    if not rows:
        return _HEAD
    counts = sum((Counter(row.counts) for row in rows), Counter[str]())
    tokens, again = sum(row.num_tokens for row in rows), sum(row.num_again for row in rows)
    done = f"{len(rows)} kills" if len(rows) >= wanted else f"{len(rows)} of {wanted} kills"
    fine = sum(not row.problems for row in rows)
    head = (
        f"The last measurement: {done} of {len({(row.mode, row.chain) for row in rows})} runs, seed {rows[0].seed},"
        f" {_minutes(rows):.0f} minutes on two shared cores of an AMD EPYC (AVX-512, no GPU), busy with other work. {fine} of {len(rows)}"
        f" are as promised.")
    promises = _table(("promised to be none", "count"), [(text, str(counts[name])) for name, text in _PROMISES.items()])
    share = (
        f"Tokens generated again: {again:,} of {tokens:,}, {again / max(tokens, 1):.1%}. Engines themselves count each token that they"
        f" sample for training, by its sample and its position, before anybody else sees it; one that is sampled twice is generated again."
        f" Groups that failed and were drawn again count whole. There are {tokens / max(len(rows), 1):,.0f} tokens and"
        f" {_num_steps(rows) / max(len(rows), 1):.0f} steps for each kill, and"
        f" {again / max(len(rows), 1):.0f} of them are lost: what was generated since the last look at running samples"
        f" (`checkpoint.journal_running_s`, 0.01 here, as answers take half a second, and 1 by default), whatever the time between two"
        f" kills.")
    replayed, gone_on = sum(row.num_replayed for row in rows), sum(row.num_gone_on for row in rows)
    if replayed:
        went_on = f" Unfinished samples went on from {gone_on:,} tokens." if gone_on else ""
        share += (
            f"{went_on}\n\nReplayed, equal in all metrics and weights: {replayed:,} steps of runs that were killed and went on.")
    modes = _table(
        ("run", "what it is", "kills", "as promised", "seconds a kill, median"), _by(rows, lambda row: row.mode, _MODES))
    moments = _table(("moment", "when", "kills", "as promised", "seconds a kill, median"), _by(rows, lambda row: row.was, _MOMENTS))
    victims = _table(
        ("killed", "kills", "as promised", "seconds a kill, median"),
        [(name, *rest) for name, _, *rest in _by(rows, lambda row: " and ".join(map(_kind, row.names)) or "nothing", {})])
    failed = f"\n\n## Not as promised\n\n{_problems(rows)}" if fine < len(rows) else ""
    if before:
        num = len({(row.mode, row.chain) for row in before})
        runs = f"{num} run{'s' * (num > 1)}"
        failed += (
            f"\n\n## Done again after a mend\n\nNot counted above are {len(before)} kills of {runs}, which were done again, with the"
            f" same draws, when the cause of what was not as promised had been mended:\n\n{_problems(before)}")
    parts = [_HEAD.rstrip(), head, promises, share, "## Runs", modes, "## Moments", moments, "## Processes", victims]
    return "\n\n".join(parts) + failed + f"\n\n{_EARLIER}"


def _problems(rows: Sequence[Row]) -> str:
    return "\n".join(
        f"- {row.mode}, {' and '.join(row.names)} at {row.was}: {_FOLDERS.sub('', '; '.join(row.problems))[:300]}"
        for row in rows if row.problems)


def _num_steps(rows: Sequence[Row]) -> int:
    """Steps of all runs; a row has those of its run so far."""
    most: dict[tuple[str, int, float], int] = {}
    for row in rows:
        run = (row.mode, row.chain, row.sitting[0])
        most[run] = max(most.get(run, 0), row.steps)
    return sum(most.values())


def _minutes(rows: Sequence[Row]) -> float:
    """Minutes that all sittings have lasted; rows of one have its begin, and how long it had lasted."""
    lasted: dict[float, float] = {}
    for row in rows:
        begin_s, lasted_s = row.sitting
        lasted[begin_s] = max(lasted.get(begin_s, 0.0), lasted_s)
    return sum(lasted.values()) / 60


def _kind(name: str) -> str:
    return name.rstrip("0123456789 ")


def _by(rows: Sequence[Row], key: Callable[[Row], str], texts: dict[str, str]) -> list[tuple[str, ...]]:
    groups: dict[str, list[Row]] = {name: [] for name in texts}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return [
        (name, texts.get(name, ""), str(len(own)), str(sum(not row.problems for row in own)), f"{median(row.wall_s for row in own):.0f}")
        for name, own in groups.items() if own]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
