"""`offbeat replay RUN`: trains the steps of a recorded run again, without engines, and says whether all came out equal."""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from offbeat.cli.common import add_json_argument
from offbeat.cli.main import loading_hint
from offbeat.controller.live_replay import LiveStep
from offbeat.controller.step_replay import ReplayedStep
from offbeat.errors import ConfigError
from offbeat.loading import load_module

DESCRIPTION = """\
Train the steps of a run again, from its journal and without engines, and compare every metric that is no time, the weights after each step,
and the state of the optimizer at each checkpoint. On the same machine with the same versions, all are equal, bit for bit. Nothing is
written into the run's folder.

The exit status is 0 if all steps are equal, 1 if one differs, and 2 if the run cannot be replayed.
"""

EXAMPLES = """\
examples:
  offbeat replay runs/my-run
  offbeat replay runs/my-run --from-step 120 --to-step 130
  offbeat replay runs/my-run --live --groups 4
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's folder, such as runs/my-run")
    parser.add_argument("--from-step", type=int, metavar="N", help="first step to compare (default: the first that can be replayed)")
    parser.add_argument("--to-step", type=int, metavar="N", help="last step to compare (default: the last one)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder for logs, which stays (default: a temporary one)")
    parser.add_argument("--live", action="store_true", help="also generate recorded answers again, and name the first token that differs")
    parser.add_argument("--groups", type=int, metavar="N", help="groups of each step to generate with --live, 0 for all (default: 1)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Replay and print a line for each step; raises ConfigError if settings were given, or the run cannot be replayed."""
    for name, value in (("--from-step", args.from_step), ("--to-step", args.to_step)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if args.from_step and args.to_step and args.from_step > args.to_step:
        raise ConfigError(f"--from-step {args.from_step} is after --to-step {args.to_step}")
    if args.groups is not None and not args.live:
        raise ConfigError("--groups is for --live, which is not given; add it, or leave --groups out")
    if args.groups is not None and args.groups < 0:
        raise ConfigError(f"--groups must be at least 0, got {args.groups}; 0 is for all groups")
    live_groups = (1 if args.groups is None else args.groups) if args.live else None
    with loading_hint():
        replay = load_module("offbeat.runs.recorded_run").replay
    printed = _Printed(as_json=args.json)
    equal = replay(args.run_dir, printed, out=args.out, first=args.from_step, last=args.to_step, live_groups=live_groups)
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
        if step.live is not None:
            print(f"        {_told(step.live)}", flush=True)

    def remark(self, text: str) -> None:
        print(json.dumps({"note": text}) if self.as_json else text, flush=True)


def _told(live: LiveStep) -> str:
    """Format what came of generating again."""
    where = f"{live.num_groups} group{'s' * (live.num_groups != 1)} generated again"
    missing = f", {live.num_missing} tokens of versions before the first are not" if live.num_missing else ""
    if live.difference:
        return f"{where}: {live.num_equal} of {live.num_tokens} tokens equal{missing}; {live.difference}"
    gap = f"up to {live.logprob_gap:.1g}" if live.logprob_gap else "bit for bit"
    return f"{where}: {live.num_tokens} tokens equal{missing}, their log-probabilities {gap}"
