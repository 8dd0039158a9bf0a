"""Arguments, console and last line that several commands share."""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

from offbeat.api import session
from offbeat.api.session import PRIVATE_UMASK
from offbeat.cli.main import loading_hint
from offbeat.config.root import Config
from offbeat.dashboard.live_page import LivePage
from offbeat.dashboard.report import write_report
from offbeat.loading import load_module
from offbeat.runs.rank_info import read_rank_info
from offbeat.telemetry.console import Console, OnOpen, choose_mode


def load_run(function: str) -> Callable[..., Any]:
    """Return a function of `runs.run`, which is called with the configuration, a console and `debug`.

    It returns None on a rank of SPMD mode that does not lead. It is loaded here and not at the top, because that takes a second more, and a
    wrong setting is found and help is shown without it.
    """
    with loading_hint():
        return getattr(load_module("offbeat.runs.run"), function)


def telling_how_to_go_on(config: Config, args: argparse.Namespace, command: Sequence[str]) -> AbstractContextManager[Callable[[], None]]:
    """Print at the end the command that continues a run, such as ["offbeat", "train", "task.toml"], as `api.session` does."""
    resumes = [] if config.run.resume else ["--run.resume", "true"]
    again = "start it with torchrun as before" if config.run.mode == "spmd" else shlex.join([*command, *resumes])
    return session.telling_how_to_go_on(config, again if read_rank_info(config.run, config.train).leads and not args.json else "")


def given_words(*words: str) -> list[str]:
    """Return the words of this process's command for a shell, such as ["offbeat", "train", "task.toml"]; `words` replace its arguments."""
    program = Path(sys.argv[0])
    if program.name != "offbeat":  # python -m offbeat, or a program of its own
        start = [sys.executable, "-m", "offbeat"]
    else:
        start = ["offbeat" if shutil.which("offbeat") == str(program) else str(program)]
    return [*start, *(words or sys.argv[1:])]


def keep_private(config: Config) -> None:
    """Make files written from now on, by this process and its children, readable by this user only, unless `run.private` is off."""
    if config.run.private:
        os.umask(PRIVATE_UMASK)


def add_config_argument(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the positional argument CONFIG, which can be left out if it is `optional`, and the option `--json`."""
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?" if optional else None, help="TOML file; --section.key value changes a setting")
    add_json_argument(parser)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of tables")


def add_dashboard_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dashboard", action="store_true",
        help="serve the live page of this run on this machine until it ends, and print its address; see offbeat watch")


@contextmanager
def run_console(config: Config, args: argparse.Namespace) -> Iterator[Console]:
    """Open the console of a run on stdout; with `--dashboard`, the live page is there from the beginning of the run until the body ends."""
    with LivePage(config.run_dir) as page, make_console(config, args, sys.stdout, on_open=page.open if args.dashboard else None) as console:
        yield console


def make_console(config: Config, args: argparse.Namespace, stream: TextIO, *, on_open: OnOpen | None = None) -> Console:
    """Create the console that the arguments and [telemetry] ask for; for `on_open` see `Console`."""
    return Console(choose_mode(stream, as_json=args.json, enabled=config.telemetry.console), stream=stream, on_open=on_open)


def report_line(config: Config, args: argparse.Namespace) -> None:
    """Write the run's report and print where it is, and where the trained model is, once the run has exported it."""
    path, model = write_report(config.run_dir), config.run_dir / "export"
    if not args.json:
        print(f"report: {path}", file=sys.stdout)
        if model.is_dir():
            print(f"model: {model}", file=sys.stdout)
