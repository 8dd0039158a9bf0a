"""`offbeat diff A B`: the first step, group and token, or metric, at which two runs part, and what changed between them."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from offbeat.cli.common import add_json_argument
from offbeat.runs.run_difference import compare_runs

DESCRIPTION = """\
Compare two runs. It prints the first step at which they part, with the group and token, or the metric; and what changed between their
settings, data, model, code and versions. The exit status is 0 if they do the same in all steps that both have, 1 if they part.
"""

EXAMPLES = """\
examples:
  offbeat diff runs/a runs/b
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", type=Path, help="a run's folder, such as runs/my-run")
    parser.add_argument("second", metavar="B", type=Path, help="the folder of another run")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print; raises ConfigError if settings were given, or one is not the folder of a run."""
    found = compare_runs(args.first, args.second)
    if args.json:
        print(json.dumps(asdict(found), ensure_ascii=False))
        return 1 if found.parting else 0
    for text in found.changed:
        print(f"changed: {text}")
    if not found.changed:
        print("settings, data, model, code and versions are the same, as far as both have them recorded")
    if found.parting is not None:
        print(f"they part at step {found.parting.global_step}: {found.parting.text}")
    elif not found.num_steps:
        print("they have no step in common, so nothing is compared")
    else:
        print(f"they do the same in all {found.num_steps} steps that both have")
    if found.num_with_groups < found.num_steps:
        print(
            f"the groups of {found.num_steps - found.num_with_groups} of {found.num_steps} steps are not in both journals, so that only"
            ' metrics were compared; checkpoint.journal_keep = "all" keeps them')
    return 1 if found.parting else 0
