"""`offbeat train`, `sft`, `dpo`, `reward-model`: training of each kind, from a configuration file or named options."""

import argparse
from collections.abc import Sequence

from offbeat.api.session import hearing_signals
from offbeat.cli.common import (
    add_config_argument,
    add_dashboard_argument,
    given_words,
    keep_private,
    load_run,
    report_line,
    run_console,
    telling_how_to_go_on,
)
from offbeat.cli.named import add_named_arguments, named_config
from offbeat.config.training_kinds import TrainingKind


def add_arguments(parser: argparse.ArgumentParser, kind: TrainingKind) -> None:
    add_config_argument(parser, optional=True)
    add_named_arguments(parser, data=kind.data, rewards=not kind.lesson)
    add_dashboard_argument(parser)


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], kind: TrainingKind) -> int:
    """Train, and print where the report is; return 130 if stopped before the end, like any interrupted command."""
    config = named_config(args, overrides, command=kind.command)
    keep_private(config)
    train = load_run("run_kind")
    with hearing_signals(), telling_how_to_go_on(config, args, given_words()) as stopped, run_console(config, args) as console:
        result = train(kind, config, console, debug=args.debug)
        if result is None:  # the leader reports for all
            return 0
        if result.stopped_early:
            stopped()
        report_line(config, args)
    return 130 if result.stopped_early else 0
