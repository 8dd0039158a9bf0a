"""`offbeat eval CONFIG`: measures the accuracy of a model on held-out prompts and evaluation sets, without training."""

import argparse
import json
from collections.abc import Sequence

from rich.console import Console as Terminal
from rich.table import Table

from offbeat.cli.common import add_config_argument, keep_private
from offbeat.config.load import load_config
from offbeat.controller.evaluate import Evaluation
from offbeat.runs.evaluation import evaluate_model
from offbeat.telemetry.console import Console

_WIDTH = 1000
"""Of a terminal in characters: a narrow one wraps lines, and cuts no figure."""

_EXAMPLES = """\
examples:
  offbeat eval examples/sort_digits.toml --model.path runs/quickstart/export
  offbeat eval examples/gsm8k.toml --model.path Qwen/Qwen3-0.6B --evaluate.num_prompts 64 --json
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `eval` to the parser."""
    parser = subparsers.add_parser(
        "eval", description="Evaluate the model at model.path on the configured held-out prompts and evaluation sets.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Evaluate the model and print the result."""
    config = load_config(args.config, overrides)
    keep_private(config)
    evaluations = evaluate_model(config, Console("quiet"))
    if args.json:
        print(json.dumps({name: value for each in evaluations for name, value in _measured(each).items()}))
    elif any(each.name for each in evaluations):
        print_table(evaluations)
    else:
        [evaluation] = evaluations
        failed = f", {evaluation.num_failed} of them failed" if evaluation.num_failed else ""
        print(f"{evaluation}, mean reward {evaluation.reward_mean:.3f}, over {evaluation.num_prompts} prompts{failed}")
    return 0


def _measured(evaluation: Evaluation) -> dict[str, float]:
    folder = f"eval/{evaluation.name}" if evaluation.name else "eval"
    return evaluation.metrics() | {f"{folder}/prompts": evaluation.num_prompts}


def print_table(evaluations: Sequence[Evaluation]) -> None:
    """Print a row for each set; a column stands only where a set has something for it."""
    shares = dict.fromkeys(name for each in evaluations for name in each.shares)
    table = Table(box=None, pad_edge=False)
    for title in ("set", "prompts", "accuracy", "95 % interval", "mean reward", *shares, "failed"):
        table.add_column(title, justify="left" if title == "set" else "right", no_wrap=True)
    for each in evaluations:
        low, high = each.interval
        own = (f"{each.shares[name]:.3f}" if name in each.shares else "" for name in shares)
        table.add_row(
            each.name or "held-out", str(each.num_prompts), f"{each.accuracy:.3f}", f"{low:.3f} to {high:.3f}", f"{each.reward_mean:.3f}",
            *own, str(each.num_failed))
    Terminal(highlight=False, width=_WIDTH).print(table)
