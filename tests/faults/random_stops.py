"""A rank of a real run is stopped, or hangs, at random moments: who is named, and when?

    python tests/faults/random_stops.py --mode controller --launcher local --times 20 [--kind hang] [--deadline 5]

`stop` sends SIGSTOP to a random rank at a random moment of a run that trains, evaluates, publishes and saves; `hang` lets it sleep at a
random one of the places where the work inside regions is done. Prints a line for each, and at the end one JSON line.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.command import Command
from small_run import ENVIRONMENT, SmallRun, build_small_model

GRACE_S = 2.0
_COMMAND_TIMEOUT_S = 150.0
_SPREAD_S = 3.0
"""Of the random moments, after the first step: several steps of such a run, each with all that a step has."""

_STATE = r"(is stopped|hangs|is slow|is unresponsive|did not get on)"
_BLAMED = rf"rank {{rank}} ({_STATE}|failed|came)"
_STRUCK = re.compile(r"injected \w+ at '(.+)' in rank \d+ at ([\d.]+)$", re.MULTILINE)
_PLACES = {"forward": 12, "backward": 12, "optimizer": 12, "copy_weights": 60, "write_checkpoint": 12, "load_model": 1}
"""Where a rank may hang, and up to which arrival there."""


@dataclass(frozen=True)
class Result:
    """Of one run.

    Attributes:
        named_s: seconds from the strike until the culprit was named, by a rank's log or the command; None if never.
        told_s: the same for the command alone.
        wrong: what blames a victim.
        text: the command's first sentence.
    """

    rank: int
    where: str
    named_s: float | None
    told_s: float | None
    wrong: str
    text: str


def main() -> int:
    """Strike as often as asked, and print what came of it."""
    args = parse_arguments()
    chance = random.Random(args.seed)
    results = []
    with tempfile.TemporaryDirectory(prefix="offbeat-stops-") as folder:
        model = build_small_model(Path(folder) / "model", seed=1)
        for _ in range(args.times):
            root = Path(folder) / "run"
            root.mkdir()
            result = strike(args, SmallRun(root, model), chance)
            shutil.rmtree(root)
            results.append(result)
            times = f"named after {result.named_s} s, told after {result.told_s} s"
            print(f"rank {result.rank}, {result.where}: {times}: {result.text}", flush=True)
    limit_s = args.deadline + GRACE_S
    named = [result.named_s for result in results if result.named_s is not None and not result.wrong]
    summary = {
        "mode": args.mode, "launcher": args.launcher, "kind": args.kind, "times": args.times, "deadline_s": args.deadline,
        "named_in_time": sum(seconds <= limit_s for seconds in named), "late": sum(seconds > limit_s for seconds in named),
        "wrongly_blamed": sum(bool(result.wrong) for result in results),
        "never_named": sum(result.named_s is None and not result.wrong for result in results),
        "named_after_s": sorted(named), "told_after_s": sorted(result.told_s for result in results if result.told_s is not None)}
    print(json.dumps(summary))
    return 0 if summary["named_in_time"] == args.times else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("controller", "spmd"), default="controller")
    parser.add_argument("--launcher", choices=("local", "ray"), default="local")
    parser.add_argument("--kind", choices=("stop", "hang"), default="stop")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--deadline", type=float, default=5.0, help="dist.sync_timeout_s of the runs")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def strike(args: argparse.Namespace, run: SmallRun, chance: random.Random) -> Result:
    """One run, from its start to the end of what is left of it."""
    rank, delay_s = chance.randrange(2), chance.uniform(0, _SPREAD_S)
    place = chance.choice(sorted(_PLACES))
    env, where = ENVIRONMENT, f"{delay_s:.2f} s after its first step"
    if args.kind == "hang":
        where = f"{place} {chance.randint(1, _PLACES[place])}"
        env = env | {"OFFBEAT_FAULT": f"rank={rank},point={place},kind=hang,nth={where.split()[1]}"}
    culprit, victim = (re.compile(rf"rank {r} {_STATE}") for r in (rank, 1 - rank))
    logs = [run.folder / "logs" / f"rank-{each}.log" for each in (0, 1)]
    command = Command(arguments(args, run), env=env, logs=logs, patterns={"culprit": culprit, "victim": victim})
    striker = Striker(command, run, rank, delay_s)
    if args.kind == "stop":
        striker.start()
    command.run(timeout_s=_COMMAND_TIMEOUT_S, grace_s=GRACE_S)
    stderr = command.stderr
    struck = _STRUCK.search("".join(text.text for text in (stderr, *command.logs.values())))
    struck_s = float(struck[2]) if struck else striker.struck_s
    if struck_s is None:
        raise RuntimeError(f"the fault did not strike:\n{stderr.text}")
    at = [text.found_s("culprit") for text in (stderr, *command.logs.values())]
    named, told = min((each for each in at if each), default=None), at[0]
    lines = [line.removeprefix("offbeat: ") for line in stderr.text.splitlines() if line.startswith("offbeat: ")]
    wrong = [line for line in lines if re.search(_BLAMED.format(rank=1 - rank), line) or not culprit.search(line)]
    seconds = (each and round(each - struck_s, 2) for each in (named, told))
    return Result(rank, where, *seconds, wrong=wrong[0] if wrong else "", text=(wrong or lines or ["nothing was said"])[0])


def arguments(args: argparse.Namespace, run: SmallRun) -> list[str]:
    """The command of a run that does not end by itself, with everything in each of its steps."""
    settings = {
        "run__total_steps": "100000", "checkpoint__every_steps": "1", "evaluate__every_steps": "1", "telemetry__trace": "false",
        "dist__sync_timeout_s": str(args.deadline), "cluster__stop_timeout_s": "3", "cluster__launcher": args.launcher}
    start = [sys.executable, "-m"]
    if args.mode == "spmd":
        settings["run__mode"] = "spmd"
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    else:
        settings["train__num_ranks"] = "2"
    return [*start, "offbeat", "train", *run.arguments(**settings)]


class Striker(threading.Thread):
    """Stops a rank's process some time after the run's first step.

    Attributes:
        struck_s: when it did, in seconds since 1970.
    """

    def __init__(self, command: Command, run: SmallRun, rank: int, delay_s: float) -> None:
        super().__init__(daemon=True)
        self.struck_s: float | None = None
        self._command = command
        self._small_run = run
        self._rank = rank
        self._delay_s = delay_s

    def run(self) -> None:
        """See the class."""
        while not (self._small_run.folder / "metrics.jsonl").exists() or not self._small_run.metrics():
            time.sleep(0.05)
        time.sleep(self._delay_s)
        process = next(filter(self._is_rank, self._command.processes()))
        self.struck_s = time.time()
        os.kill(process.pid, signal.SIGSTOP)

    def _is_rank(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            words = process.cmdline()
            if "offbeat.process" in words:
                return f"rank {self._rank}" in words
            return "offbeat" in words and "spmd" in words and process.environ().get("RANK") == str(self._rank)
        return False


if __name__ == "__main__":
    sys.exit(main())
