"""`offbeat replay RUN`: trains the steps of a recorded run again, without engines, and says whether all came out equal."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from offbeat.cli.common import add_json_argument
from offbeat.cli.help import HelpFormatter
from offbeat.cli.main import loading_hint
from offbeat.controller.step_replay import ReplayedStep
from offbeat.errors import ConfigError
from offbeat.loading import load_module

_DESCRIPTION = """\
Train the steps of a run again, from its journal and without engines, and compare every metric that is no time, the weights after each step,
and the state of the optimizer at each checkpoint. On the same machine with the same versions, all are equal, bit for bit. Nothing is
written into the run's folder.

The exit status is 0 if all steps are equal, 1 if one differs, and 2 if the run cannot be replayed.
"""

_EXAMPLES = """\
examples:
  offbeat replay runs/my-run
  offbeat replay runs/my-run --from-step 120 --to-step 130
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `replay` to the parser."""
    parser = subparsers.add_parser(
        "replay", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=HelpFormatter)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's folder, such as runs/my-run")
    parser.add_argument("--from-step", type=int, metavar="N", help="first step to compare (default: the first that can be replayed)")
    parser.add_argument("--to-step", type=int, metavar="N", help="last step to compare (default: the last one)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder for logs, which stays (default: a temporary one)")
    add_json_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Replay and print a line for each step.

    Raises:
        ConfigError: settings were given, or the run cannot be replayed.
    """
    if overrides:
        raise ConfigError(f"replay takes no settings, got --{overrides[0][0]}; a run is replayed with its own")
    for name, value in (("--from-step", args.from_step), ("--to-step", args.to_step)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if args.from_step and args.to_step and args.from_step > args.to_step:
        raise ConfigError(f"--from-step {args.from_step} is after --to-step {args.to_step}")
    with loading_hint():
        replay = load_module("offbeat.runs.recorded_run").replay
    equal = replay(args.run_dir, _Printed(as_json=args.json), out=args.out, first=args.from_step, last=args.to_step)
    if not args.json:
        print("all steps are equal" if equal else "the replay differs from the run")
    return 0 if equal else 1


@dataclass(frozen=True)
class _Printed:
    """Prints how a replay goes on."""

    as_json: bool

    def compared(self, step: ReplayedStep) -> None:
        if self.as_json:
            print(json.dumps(asdict(step)), flush=True)
            return
        compared = [f"{step.num_metrics} metrics"] * bool(step.num_metrics) + ["weights"] * step.has_weights
        compared += ["checkpoint"] * step.has_checkpoint + ["export"] * step.has_export
        told = f"differs: {step.difference}" if step.difference else f"equal ({', '.join(compared) or 'nothing to compare'})"
        print(f"step {step.global_step}  {told}", flush=True)

    def remark(self, text: str) -> None:
        print(json.dumps({"note": text}) if self.as_json else text, flush=True)
