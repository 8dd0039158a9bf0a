"""Arguments, console and last line that several commands share."""

import argparse
import os
import sys
from typing import TextIO

from offbeat.config.root import Config
from offbeat.dashboard.report import write_report
from offbeat.telemetry.console import Console, choose_mode

_PRIVATE_UMASK = 0o077


def keep_private(config: Config) -> None:
    """Make files written from now on, by this process and its children, readable by this user only, unless `run.private` is off."""
    if config.run.private:
        os.umask(_PRIVATE_UMASK)


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument CONFIG and the option `--json`."""
    parser.add_argument("config", metavar="CONFIG", help="TOML file; --section.key value changes a setting")
    add_json_argument(parser)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of tables")


def make_console(config: Config, args: argparse.Namespace, stream: TextIO) -> Console:
    """Create the console that the arguments and [telemetry] ask for."""
    return Console(choose_mode(stream, as_json=args.json, enabled=config.telemetry.console), stream=stream)


def report_line(config: Config, args: argparse.Namespace) -> None:
    """Write the run's report and print where it is."""
    path = write_report(config.run_dir)
    if not args.json:
        print(f"report: {path}", file=sys.stdout)
