"""The `offbeat` command: finds the subcommand, splits off `--section.key value`, and turns errors into one sentence and an exit code.

Exit codes: 0 done, 1 a run failed, 2 user error, 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from offbeat.config.load import split_overrides
from offbeat.errors import OffbeatError
from offbeat.loading import load_module

_COMMANDS = {
    "quickstart": "quickstart", "train": "train", "sft": "sft", "dpo": "dpo", "reward-model": "reward_model", "eval": "evaluate",
    "engine": "engine", "serve": "serve", "launch": "launch", "config": "config", "data": "data", "doctor": "doctor", "report": "report"}
"""Module of each command."""

_DESCRIPTION = """\
Asynchronous reinforcement-learning post-training for language models.

Start with `offbeat quickstart`: it trains a small model from random weights in about a minute, on any machine.
Then `offbeat train CONFIG` for your own task. Any setting can be given as --section.key value; `offbeat config docs` lists them.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    try:
        overrides, rest = split_overrides([word for word in argv if word != "--debug"])
        args = build_parser(rest[0] if rest else "").parse_args(rest)
        args.debug = debug
        return args.run(args, overrides)
    except OffbeatError as exc:
        if debug:
            raise
        print_error(exc)
        return exc.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("offbeat: interrupted", file=sys.stderr)
        return 130
    except Exception as exc:
        if debug:
            raise
        sys.stderr.write(f"offbeat: unexpected {type(exc).__name__}: {exc}; --debug shows where\n")
        return 1


def build_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of one command, or of all commands if the name is none of them.

    Importing what the other commands need takes longer than most commands run.
    """
    parser = argparse.ArgumentParser(prog="offbeat", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debug", action="store_true", help="show tracebacks, and log in detail")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in [_COMMANDS[command]] if command in _COMMANDS else _COMMANDS.values():
        load_module(f"offbeat.cli.{module}").add_parser(commands)
    return parser


def print_error(exc: OffbeatError) -> None:
    """Print one sentence on stderr, and before it, for a failed run, its processes' notes, so that the last lines say what went wrong."""
    notes = getattr(exc, "__notes__", []) if exc.exit_code == 1 else []
    lines = [*(note for note in notes if "\n" in note), f"offbeat: {exc}", *(f"  {note}" for note in notes if "\n" not in note)]
    # Written at once, because in SPMD mode every rank writes to the same terminal.
    sys.stderr.write("".join(f"{line}\n" for line in lines))
