"""`offbeat compare A B`: whether one evaluation is better than another, prompt by prompt."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

from offbeat.cli.common import add_json_argument
from offbeat.errors import ConfigError, printable
from offbeat.evaluation.comparison import SetComparison, compare
from offbeat.evaluation.find import find_evaluation

WIDTH = 1000
"""Width of the table in characters: a narrow terminal wraps its lines instead of cutting figures."""
_MOST_TEXT = 300

DESCRIPTION = """\
Compare two evaluations of the same prompts. A and B are each a run (its last evaluation), the file or folder that `offbeat eval` has
written (FILE.json:MODEL of several models), or a file of answers, such as runs/NAME/evaluations/step-000000.jsonl.zst.

For each set it prints the difference B - A of every score with its 95 % interval, the p-value of a paired permutation test (McNemar's
exact test where every prompt has one answer, right or wrong), and the prompts whose rewards changed most.
"""

EXAMPLES = """\
examples:
  offbeat compare runs/a runs/b
  offbeat compare runs/a/evaluations/step-000000.jsonl.zst runs/a
  offbeat compare before.json after.json --changes 20 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="the evaluation or run that is compared with")
    parser.add_argument("second", metavar="B", help="the evaluation or run that may be better")
    parser.add_argument(
        "--changes", type=int, default=5, metavar="N", help="show the N prompts of each set whose mean reward changed most (default: 5)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print; raises ConfigError for an invalid option, DataError without two evaluations that have something in common."""
    if args.changes < 0:
        raise ConfigError(f"--changes must be at least 0, got {args.changes}")
    first, second = find_evaluation(args.first), find_evaluation(args.second)
    compared = compare(first, second, num_changes=args.changes)
    if args.json:
        print(json.dumps({"first": args.first, "second": args.second, "sets": [_as_json(each) for each in compared]}, ensure_ascii=False))
        return 0
    terminal = Terminal(highlight=False, width=WIDTH)
    terminal.print(Text(f"A  {args.first}\nB  {args.second}\n"))
    print_differences(compared, terminal)
    for name, own, other in (("A", first, second), ("B", second, first)):
        if alone := [each.title for key, each in own.items() if key not in other]:
            terminal.print(Text(f"only {name} has {', '.join(alone)}"))
    for each in compared:
        if each.mismatch:
            terminal.print(Text(each.mismatch))
    for each in compared:
        _print_changes(each, terminal)
    return 0


def print_differences(compared: Sequence[SetComparison], terminal: Terminal) -> None:
    """Print a row for each score of each set."""
    table = Table(box=None, pad_edge=False)
    for title in ("set", "score", "prompts", "A", "B", "B - A", "95 % interval", "p", "better", "worse"):
        table.add_column(title, justify="left" if title in ("set", "score") else "right", no_wrap=True)
    for each in compared:
        for found in each.differences:
            low, high = found.interval
            table.add_row(
                each.title, found.score, str(each.num_prompts), f"{found.first:.3f}", f"{found.second:.3f}", f"{found.difference:+.3f}",
                f"{low:+.3f} to {high:+.3f}", "< 0.001" if found.p_value < 0.001 else f"{found.p_value:.3f}",
                str(found.num_better), str(found.num_worse))
    terminal.print(table)


def _print_changes(compared: SetComparison, terminal: Terminal) -> None:
    if compared.changes:
        terminal.print(Text(f"\n{compared.title}: prompts whose mean reward changed most"))
    for change in compared.changes:
        question = change.prompt if isinstance(change.prompt, str) else change.prompt[-1]["content"]
        terminal.print(Text(f"\n{change.first:.3f} -> {change.second:.3f}  ").append(printable(question, most=_MOST_TEXT)))
        for name, text in (("answer", change.answer), ("A", change.first_text), ("B", change.second_text)):
            terminal.print(Text(f"  {name}: {printable(text, most=_MOST_TEXT)}"))


def _as_json(compared: SetComparison) -> dict[str, Any]:
    """Return all fields and differences as plain values."""
    return {
        "set": compared.title, "prompts": compared.num_prompts, "only_first": compared.num_only_first,
        "only_second": compared.num_only_second, "mismatch": compared.mismatch,
        "differences": [asdict(each) | {"difference": each.difference} for each in compared.differences],
        "changes": [asdict(each) | {"difference": each.difference} for each in compared.changes]}
