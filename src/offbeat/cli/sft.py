"""`offbeat sft CONFIG`: supervised fine-tuning on a dataset's answers."""

import argparse
import sys
from collections.abc import Sequence

from offbeat.cli.common import add_config_argument, keep_private, make_console, report_line
from offbeat.config.load import load_config
from offbeat.runs.run import run_supervised

_EXAMPLES = """\
examples:
  offbeat sft examples/sort_digits.toml --run.name sorting-sft --sft.total_steps 60 --sft.evaluate_every_steps 10
  offbeat train examples/sort_digits.toml --model.path runs/sorting-sft/export --run.warm_up false
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `sft` to the parser."""
    parser = subparsers.add_parser(
        "sft", help="fine-tune on a dataset's answers", description="Supervised fine-tuning; the result is in the run's folder export.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Fine-tune the model, and print where the report is; return 130 if stopped before the end."""
    config = load_config(args.config, overrides)
    keep_private(config)
    result = run_supervised(config, make_console(config, args, sys.stdout), debug=args.debug)
    if result is None:  # a rank in SPMD mode; the leader reports for all
        return 0
    report_line(config, args)
    return 130 if result.stopped_early else 0
