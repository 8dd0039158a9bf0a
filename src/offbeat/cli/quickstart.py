"""`offbeat quickstart`: from random weights to a model that sorts digits in about a minute, with the same processes as any run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from offbeat.api.session import hearing_signals
from offbeat.cli.common import (
    add_dashboard_argument,
    add_json_argument,
    given_words,
    keep_private,
    load_run,
    report_line,
    run_console,
    telling_how_to_go_on,
)
from offbeat.config.load import load_config
from offbeat.errors import NotLearnedError

_CONFIG = Path(__file__).with_name("quickstart.toml")
_MIN_ACCURACY = 0.85
_MIN_GAIN = 0.30

DESCRIPTION = """\
Builds a 0.6M-parameter model with random weights, gives it a short supervised warm-up until it sorts 8 digits in 30 % of 256 held-out
cases, and improves it with asynchronous GRPO: one process learns while another generates. Prints accuracy before and after, and writes a
report with curves and a time line to runs/quickstart/report.html. Exit code 1 if it did not learn.
"""
EXAMPLES = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and sampling (default: 0)")
    add_json_argument(parser)
    add_dashboard_argument(parser)


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Train, and check that the model has learned; raises NotLearnedError if held-out accuracy is below 0.85, or rose by less than 0.30."""
    config = load_config(str(_CONFIG), [("run.name", "quickstart"), ("run.seed", str(args.seed)), *overrides])
    keep_private(config)
    run_training = load_run("run_training")
    # The quick start itself begins anew each time.
    again = given_words("train", str(config.run_dir / "config.toml"))
    with hearing_signals(), telling_how_to_go_on(config, args, again) as stopped, run_console(config, args) as console:
        result = run_training(config, console, debug=args.debug, fresh=True)
        if result is None:  # a rank in SPMD mode; the leader reports for all
            return 0
        if result.stopped_early:
            stopped()
        report_line(config, args)
    if result.stopped_early:
        return 130
    before, after = result.heldout_before or 0.0, result.heldout_after or 0.0
    if after < _MIN_ACCURACY or after < before + _MIN_GAIN:
        raise NotLearnedError(
            f"held-out accuracy went from {before:.3f} to {after:.3f}; expected at least {_MIN_ACCURACY} and {_MIN_GAIN} more than before")
    if not args.json:
        print(f"held-out accuracy: {before:.3f} before, {after:.3f} after, in {result.train_wall_s:.0f} s")
    return 0
