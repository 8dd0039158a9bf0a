"""`offbeat reward-model CONFIG`: trains a reward model on pairs of answers."""

import argparse
import sys
from collections.abc import Sequence

from offbeat.cli.common import add_config_argument, keep_private, make_console, report_line
from offbeat.config.load import load_config
from offbeat.runs.run import run_reward_model

_EXAMPLES = """\
examples:
  offbeat reward-model task.toml --run.name rewards --model.path Qwen/Qwen3-0.6B --data.path pairs.jsonl
  offbeat train task.toml --rollout.reward model:runs/rewards/export
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `reward-model` to the parser."""
    parser = subparsers.add_parser(
        "reward-model", help="train a reward model on pairs of answers",
        description="Trains a reward model on chosen and rejected answers; the result, in the run's folder export, is a Hugging Face folder"
        " for sequence classification.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Train the reward model, and print where the report is; return 130 if stopped before the end."""
    config = load_config(args.config, overrides)
    keep_private(config)
    result = run_reward_model(config, make_console(config, args, sys.stdout), debug=args.debug)
    if result is None:  # a rank in SPMD mode; the leader reports for all
        return 0
    report_line(config, args)
    return 130 if result.stopped_early else 0
