"""`offbeat eval CONFIG`: measures the held-out accuracy of a model without training."""

import argparse
import json
from collections.abc import Sequence

from offbeat.cli.common import add_config_argument, keep_private
from offbeat.config.load import load_config
from offbeat.runs.evaluation import evaluate_model
from offbeat.telemetry.console import Console

_EXAMPLES = """\
examples:
  offbeat eval examples/sort_digits.toml --model.path runs/quickstart/export
  offbeat eval examples/gsm8k.toml --model.path Qwen/Qwen3-0.6B --evaluate.num_prompts 64 --json
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `eval` to the parser."""
    parser = subparsers.add_parser(
        "eval", help="measure held-out accuracy", description="Evaluate the model at model.path on the configured held-out prompts.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Evaluate the model and print the result."""
    config = load_config(args.config, overrides)
    keep_private(config)
    evaluation = evaluate_model(config, Console("quiet"))
    if args.json:
        print(json.dumps(evaluation.metrics() | {"eval/prompts": evaluation.num_prompts}))
    else:
        failed = f", {evaluation.num_failed} of them failed" if evaluation.num_failed else ""
        print(f"{evaluation}, mean reward {evaluation.reward_mean:.3f}, over {evaluation.num_prompts} prompts{failed}")
    return 0
