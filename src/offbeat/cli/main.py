"""The `offbeat` command: finds the subcommand, splits off `--section.key value`, and turns errors into one sentence and an exit code.

Exit codes: 0 done, 1 a run failed, 2 user error, 130 interrupted.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from typing import Any

from offbeat.cli.help import CommandParser, HelpFormatter
from offbeat.config.load import listed_errors, near_settings, split_overrides, suggestion, unknown_setting
from offbeat.config.root import TRAINING_KINDS
from offbeat.config.training_kinds import TrainingKind
from offbeat.errors import ConfigError, OffbeatError, of_disk
from offbeat.extras import TRAIN, require
from offbeat.loading import load_module
from offbeat.telemetry.streams import drop, tolerant_output


@dataclass(frozen=True)
class Command:
    """A command in the list that `offbeat --help` shows.

    Attributes:
        group: heading under which the list shows it.
        module: module of `offbeat.cli` that adds its arguments and runs it.
        needs_train: whether it loads models or runs workers, for which the extra `train` must be installed. Such work goes on when
            nobody reads its output any more.
        training: the kind of training that it does, which its module is given.
        no_settings: why it takes no settings, or what to do instead; None if it takes them.
    """

    group: str
    module: str
    summary: str
    needs_train: bool = False
    training: TrainingKind | None = None
    no_settings: str | None = None


COMMANDS = {
    "quickstart": Command("train", "quickstart", "learn to sort digits from scratch, in about a minute", needs_train=True),
    "init": Command("train", "init", "write a folder with a task of your own to begin with", no_settings="write it into task.toml"),
    "config": Command("train", "config", "show, check or explain configurations"),
    **{name: Command("train", "train", kind.summary, needs_train=True, training=kind) for name, kind in TRAINING_KINDS.items()},
    "data": Command("data and evaluation", "data", "show what the model will see of the data", needs_train=True),
    "eval": Command("data and evaluation", "evaluate", "measure held-out accuracy", needs_train=True),
    "compare": Command(
        "data and evaluation", "compare", "compare two evaluations or runs, prompt by prompt",
        no_settings="evaluations are compared as they are"),
    "rollouts": Command("runs", "rollouts", "list and read what the policy wrote", no_settings="see offbeat rollouts --help"),
    "watch": Command("runs", "watch", "show runs as a live page, with every rollout", no_settings="see offbeat watch --help"),
    "diff": Command("runs", "diff", "find where two runs part, and what changed", no_settings="runs are compared as they are"),
    "replay": Command(
        "runs", "replay", "train a run's steps again and compare them", needs_train=True, no_settings="a run is replayed with its own"),
    "report": Command(
        "runs", "report", "write a run's report as one HTML file", no_settings="a report shows the run as it was configured"),
    "push": Command(
        "runs", "push", "send a run's model to a Hugging Face hub", no_settings="the model is sent as the run has exported it"),
    "engine": Command("serving", "engine", "serve a model over HTTP", needs_train=True),
    "serve": Command("serving", "serve", "let many clients train and sample adapters over HTTP", needs_train=True),
    "docs": Command("machine", "pages", "read a page of the documentation", no_settings="'offbeat config docs' lists all settings"),
    "doctor": Command(
        "machine", "doctor", "check that this machine is ready", no_settings="check a configuration with offbeat config check"),
    "launch": Command("machine", "launch", "write a batch script for a cluster", needs_train=True),
    "completion": Command("machine", "completion", "print a script that completes commands and settings in a shell", no_settings=""),
}

_MOST_NAMED = 4
_SECTIONED = re.compile(r"--[A-Za-z_]\w*(\.\w+)+")

_DESCRIPTION = """\
Asynchronous reinforcement-learning post-training for language models.

Start with `offbeat quickstart`: it trains a small model from random weights in about a minute, on any machine.
Then `offbeat train CONFIG` for your own task. Any setting can be given as --section.key value; `offbeat config docs` lists them, and
`offbeat docs` the pages of the documentation.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    with tolerant_output(survives=any(word in COMMANDS and COMMANDS[word].needs_train for word in argv)):
        return _run_command(argv)


def _run_command(argv: list[str]) -> int:
    debug = "--debug" in argv
    try:
        overrides, rest = split_overrides([word for word in argv if word != "--debug"])
        command = rest[0] if rest else ""
        parser = build_parser(command)
        if not command:
            parser.print_help(sys.stderr)
            return ConfigError.exit_code
        if not (command in COMMANDS or command.startswith("-")):
            raise ConfigError(_no_command(command))
        args, unknown = parser.parse_known_args(rest)
        if unknown:
            raise ConfigError(listed_errors([_no_argument(word, command) for word in _not_understood(unknown)]))
        args.debug = debug
        if (instead := COMMANDS[command].no_settings) is None:
            return args.run(args, overrides)
        if overrides:
            raise ConfigError(f"{command} takes no settings, got --{overrides[0][0]}{instead and f'; {instead}'}")
        return args.run(args)
    except OffbeatError as exc:
        if debug:
            raise
        print_error(exc)
        return exc.exit_code
    except BrokenPipeError:  # of a command that only prints: its reader has seen enough
        drop(sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("offbeat: interrupted", file=sys.stderr)
        return 130
    except Exception as exc:  # the outermost boundary: a sentence instead of a traceback
        if debug:
            raise
        if (told := of_disk(exc)) is not None:
            print_error(told)
            return told.exit_code
        sys.stderr.write(f"offbeat: unexpected {type(exc).__name__}: {exc}; --debug shows where\n")
        return 1


def build_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of one command, or a list of all commands if the name is none of them.

    Importing the modules of the other commands takes longer than most commands run. Raises MissingExtraError if the command trains, and the
    extra `train` is not installed.
    """
    parser = argparse.ArgumentParser(
        prog="offbeat", usage="offbeat [-h] [--version] [--debug] COMMAND ...", description=f"{_DESCRIPTION}\n{_command_list()}",
        formatter_class=HelpFormatter)
    parser.add_argument("--version", action=_Version, help="print the version and end")
    parser.add_argument("--debug", action="store_true", help="show tracebacks, and log in detail")
    commands = parser.add_subparsers(prog="offbeat", metavar="COMMAND", required=True, help=argparse.SUPPRESS, parser_class=CommandParser)
    if command not in COMMANDS:
        for name in COMMANDS:
            commands.add_parser(name)
        return parser
    if COMMANDS[command].needs_train:
        require("train", TRAIN, wanted_by=command)
    kind = COMMANDS[command].training
    with loading_hint() if COMMANDS[command].needs_train else nullcontext():
        module = load_module(f"offbeat.cli.{COMMANDS[command].module}")
    if kind is not None:
        own = commands.add_parser(command, description=kind.description, epilog=kind.examples)
        module.add_arguments(own, kind)
        own.set_defaults(run=partial(module.run, kind=kind))
    else:
        own = commands.add_parser(command, description=module.DESCRIPTION, epilog=module.EXAMPLES)
        module.add_arguments(own)
        own.set_defaults(run=module.run)
    return parser


def _command_list() -> str:
    """Return the commands with their summaries, under the headings of their groups."""
    width = max(map(len, COMMANDS))
    groups = dict.fromkeys(command.group for command in COMMANDS.values())
    return "\n".join(
        "\n".join([f"{group}:", *(f"  {name:<{width}}  {known.summary}" for name, known in COMMANDS.items() if known.group == group), ""])
        for group in groups)


def _no_command(name: str) -> str:
    near = get_close_matches(name, COMMANDS, n=1)
    return f"{name} is not a command; " + (f"did you mean {near[0]}?" if near else "'offbeat --help' lists them")


def _not_understood(unknown: Sequence[str]) -> list[str]:
    """Return each word that the parser left over, once, without words after an option, which may be its value."""
    kept, before = [], ""
    for word in unknown:
        if not _is_option(before) or "=" in before or _is_option(word):
            kept.append(word)
        before = word
    return list(dict.fromkeys(kept))


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _no_argument(word: str, command: str) -> str:
    """Return advice on a word that the command does not understand, such as a setting without its section."""
    if not _is_option(word):
        return f"'offbeat {command}' has no use for {word!r}; 'offbeat {command} --help' shows what it takes"
    name = word.partition("=")[0]
    if _SECTIONED.fullmatch(name):
        return unknown_setting(name.removeprefix("--"))
    near = near_settings(name.lstrip("-"))
    advice = (
        suggestion(near[:_MOST_NAMED], prefix="--") if near else
        f"'offbeat {command} --help' lists them, and any setting can be given as --section.key value")
    return f"{name} is not an option of 'offbeat {command}'; {advice}"


@contextmanager
def loading_hint() -> Iterator[None]:
    """Show on a terminal that libraries are being loaded, for seconds if the command trains, and remove the text at the end."""
    says = sys.stdout.isatty() and "--json" not in sys.argv
    if says:
        sys.stdout.write("offbeat: loading")
        sys.stdout.flush()
    try:
        yield
    finally:
        if says:
            sys.stdout.write("\r\x1b[2K")
            sys.stdout.flush()


class _Version(argparse.Action):
    """Prints the version of the installed package; looked up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"offbeat {version('offbeat')}")
        parser.exit()


def print_error(exc: OffbeatError) -> None:
    """Print the error on stderr in one sentence; before it, for a failed run, its processes' long notes, so that the error comes last."""
    notes = getattr(exc, "__notes__", []) if exc.exit_code == 1 else []
    lines = [*(note for note in notes if "\n" in note), f"offbeat: {exc}", *(f"  {note}" for note in notes if "\n" not in note)]
    # Written at once, because in SPMD mode every rank writes to the same terminal.
    sys.stderr.write("".join(f"{line}\n" for line in lines))
