"""What several commands share: their arguments, their console and their last line."""

import argparse
import os
import sys
from typing import TextIO

from offbeat.config.root import Config
from offbeat.dashboard.report import write_report
from offbeat.telemetry.console import Console, choose_mode

_PRIVATE_UMASK = 0o077


def keep_private(config: Config) -> None:
    """Write what follows, in this process and those that it starts, for this user's eyes only, unless `run.private` is off."""
    if config.run.private:
        os.umask(_PRIVATE_UMASK)


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """The positional CONFIG and `--json`."""
    parser.add_argument("config", metavar="CONFIG", help="TOML file; --section.key value changes a setting")
    add_json_argument(parser)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of tables")


def make_console(config: Config, args: argparse.Namespace, stream: TextIO) -> Console:
    """The console that the arguments and [telemetry] ask for."""
    return Console(choose_mode(stream, as_json=args.json, enabled=config.telemetry.console), stream=stream)


def report_line(config: Config, args: argparse.Namespace) -> None:
    """Write the run's report and say where it is."""
    path = write_report(config.run_dir)
    if not args.json:
        print(f"report: {path}", file=sys.stdout)
