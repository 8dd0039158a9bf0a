"""`offbeat train CONFIG`: reinforcement learning according to a configuration."""

import argparse
import sys
from collections.abc import Sequence

from offbeat.cli.common import add_config_argument, keep_private, make_console, report_line
from offbeat.config.load import load_config
from offbeat.runs.run import run_training

_EXAMPLES = """\
examples:
  offbeat train examples/sort_digits.toml
  offbeat train examples/sort_digits.toml --train.num_ranks 2 --inference.num_engines 2 --cluster.launcher ray
  torchrun --nproc-per-node 2 -m offbeat train examples/sort_digits.toml --run.mode spmd
  offbeat train run.toml --run.name second --rollout.max_head_offpolicyness 4

A run that was interrupted goes on from its newest checkpoint when it is started again. Ctrl-C once finishes the step and saves.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `train` to the parser."""
    parser = subparsers.add_parser(
        "train", help="train with reinforcement learning", description="Train a model with asynchronous GRPO.", epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Train, and print where the report is; return 130 if stopped before the end, like any interrupted command."""
    config = load_config(args.config, overrides)
    keep_private(config)
    result = run_training(config, make_console(config, args, sys.stdout), debug=args.debug)
    if result is None:  # a rank in SPMD mode; the leader reports for all
        return 0
    report_line(config, args)
    return 130 if result.stopped_early else 0
