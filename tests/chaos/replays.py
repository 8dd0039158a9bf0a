"""`make replays`: runs with the quick start's settings are killed twenty times each, come to their end, and are replayed to the bit.

What is done goes to build/replays, where an interrupted sitting goes on: a run from its last kill, a replay from its beginning. It writes
the table of docs/replay.md.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.kills import PLAYING, num_rows
from faults.command import Command
from small_run import ENVIRONMENT, offbeat

ROOT = Path(__file__).parents[2]
WORK, DOCUMENT = ROOT / "build" / "replays", ROOT / "docs" / "replay.md"
BEGIN, END = "<!-- written by make replays -->\n", "<!-- end -->\n"
_QUICK_START = ROOT / "src" / "offbeat" / "cli" / "quickstart.toml"
_LIFE_S, _GRACE_S, _REPLAY_S = 3600.0, 15.0, 3600.0
_MOST_DELAY_S = 1.5
_START_UP_S = (0.5, 8.0)
_LAST_SHARE = 0.9
"""Kills are drawn from this share of a run's steps, so that the run is not at its end before the last of them."""

_LEARNT = {"run.warm_up": "false", "checkpoint.every_steps": "20", "checkpoint.journal_running_s": "0.05"}
"""For runs that begin with a model that has had its warm-up; a warm-up on several ranks is not replayed."""

_PATIENT = {
    "cluster.start_timeout_s": "900", "inference.start_timeout_s": "900", "inference.probe_timeout_s": "120",
    "inference.stall_timeout_s": "300", "weights.stage_timeout_s": "300", "weights.switch_timeout_s": "300", "dist.sync_timeout_s": "300"}
"""A busy machine must not end a run that is not killed."""


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        about: for the table.
        begins: whether it begins with the model of the quick start's warm-up.
    """

    about: str
    steps: int
    settings: dict[str, str]
    begins: bool = True


KINDS = {
    "quick start": Kind("asynchronous, one rank, with its warm-up, no checkpoint before the end", 120, {}, begins=False),
    "two ranks": Kind("two train ranks", 60, {"train.num_ranks": "2"}),
    "adapter": Kind("LoRA of rank 8", 60, {"model.lora.rank": "8", "train.optimizer.lr": "1e-3"}),
    "agents": Kind("episodes of two turns in two processes of the user's code", 60, {
        "rollout.workflow": "gym", "agent.environment": f"{PLAYING}:Digits", "agent.processes": "2",
        "rollout.consumer_batch_size": "16", "rollout.max_concurrent_rollouts": "64"})}


@dataclass(frozen=True)
class Sitting:
    """One run, as far as it has come.

    Attributes:
        at: for each kill, the steps that were done and whether the command was still starting.
        replayed, equal: steps that were trained again, and those of them that came out equal.
        metrics, weights, checkpoints, exports: how many of them were compared.
        wall_s: seconds, without interruptions.
    """

    kind: str
    seed: int
    kills: int
    steps: int
    at: tuple[tuple[int, bool], ...] = ()
    replayed: int = 0
    equal: int = 0
    metrics: int = 0
    weights: int = 0
    checkpoints: int = 0
    exports: int = 0
    wall_s: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        return self.replayed > 0 or bool(self.problems)

    @property
    def is_equal(self) -> bool:
        return self.equal == self.replayed == self.steps and self.exports > 0 and not self.problems


@dataclass
class Life:
    """One command of a run, until it ends or is killed."""

    arguments: list[str]
    command: Command = field(init=False)

    def __post_init__(self) -> None:
        self.command = Command([sys.executable, "-m", "offbeat", *self.arguments], env=ENVIRONMENT, logs=[], patterns={})
        self._thread = threading.Thread(target=self.command.run, kwargs={"timeout_s": _LIFE_S, "grace_s": _GRACE_S}, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def kill(self) -> None:
        """Kill all of its processes at once, as a batch system does."""
        for process in self.command.processes():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """Wait until nothing of it is there."""
        self._thread.join()


def main() -> int:
    """Do what is left, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--kills", type=int, default=20, help="of each run (default: 20)")
    parser.add_argument("--steps", type=int, default=0, help="of each run (default: 120 of the quick start, 60 of the others)")
    parser.add_argument("--seed", type=int, default=30, help="of the moments (default: 30)")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the runs (default: build/replays)")
    parser.add_argument("--no-page", action="store_true", help="leave docs/replay.md as it is")
    parser.add_argument("--write-only", action="store_true", help="write the table of the sittings there are")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for kind in [] if args.write_only else args.kinds:
        sit(args.work, Sitting(kind, args.seed, args.kills, args.steps or KINDS[kind].steps))
    sittings = [msgspec.json.decode(path.read_bytes(), type=Sitting) for kind in KINDS if (path := record_of(args.work, kind)).exists()]
    if not args.no_page:
        DOCUMENT.write_text(spliced(DOCUMENT.read_text(encoding="utf-8"), table(sittings)), encoding="utf-8")
    for each in sittings:
        print(f"{each.kind}: {len(each.at)} kills, {each.equal} of {each.steps} steps equal; {'; '.join(each.problems) or 'no problem'}")
    return 0 if len(sittings) == len(KINDS) and all(each.is_equal for each in sittings) else 1


def sit(work: Path, wanted: Sitting) -> Sitting:
    """Do what is left of a sitting; returns it as it ended."""
    record = record_of(work, wanted.kind)
    sitting = msgspec.json.decode(record.read_bytes(), type=Sitting) if record.exists() else wanted
    if (sitting.seed, sitting.kills, sitting.steps) != (wanted.seed, wanted.kills, wanted.steps):
        raise SystemExit(f"{record} is of a sitting with other kills, steps or seed; remove it, and its run, to begin a new one")
    if sitting.is_done:
        return sitting
    folder = work / record.stem
    if not sitting.at and not record.exists():
        shutil.rmtree(folder, ignore_errors=True)
    arguments = arguments_of(work, sitting, folder)
    for step, delay_s, start_s in moments(sitting)[len(sitting.at):]:
        begun_s = time.monotonic()
        at = kill_once(arguments, folder, step=step, delay_s=delay_s, start_s=start_s)
        if at is None:
            return kept(record, replace(sitting, problems=("the run came to its end before its last kill",)))
        sitting = kept(record, replace(
            sitting, at=(*sitting.at, at), wall_s=round(sitting.wall_s + time.monotonic() - begun_s, 1)))
        print(f"{sitting.kind}: kill {len(sitting.at)} of {sitting.kills} after {at[0]} steps{', starting' if at[1] else ''}", flush=True)
    return kept(record, finished(arguments, folder, sitting))


def record_of(work: Path, kind: str) -> Path:
    """The file that says how far the sitting of a kind has come."""
    return work / f"{kind.replace(' ', '-')}.json"


def kept(record: Path, sitting: Sitting) -> Sitting:
    """Write a sitting's record, so that it goes on from there."""
    part = record.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(sitting))
    part.replace(record)
    return sitting


def moments(sitting: Sitting) -> list[tuple[int, float, float]]:
    """Draw the kills: each after how many steps and seconds, or seconds after the start where those steps are done before."""
    chance = random.Random(f"{sitting.seed} {sitting.kind}")
    steps = sorted(int(chance.random() * _LAST_SHARE * sitting.steps) for _ in range(sitting.kills))
    return [(step, chance.uniform(0.0, _MOST_DELAY_S), chance.uniform(*_START_UP_S)) for step in steps]


def arguments_of(work: Path, sitting: Sitting, folder: Path) -> list[str]:
    """Arguments of the command of a sitting's run."""
    kind = KINDS[sitting.kind]
    settings = {"run.dir": str(folder.parent), "run.name": folder.name, "run.total_steps": str(sitting.steps)}
    settings |= {"checkpoint.journal_keep": "all"} | _PATIENT
    if kind.begins:
        settings |= _LEARNT | {"model.path": str(learnt_model(work))}
    settings |= kind.settings
    return ["train", str(_QUICK_START), *(word for name, value in settings.items() for word in (f"--{name}", value))]


def learnt_model(work: Path) -> Path:
    """The model after the quick start's warm-up and one step, which is made once."""
    folder = work / "learnt"
    if not (folder / "result.json").exists():
        done = offbeat(
            "train", str(_QUICK_START), "--run.dir", str(work), "--run.name", folder.name, "--run.total_steps", "1", timeout_s=_LIFE_S)
        if done.returncode:
            raise RuntimeError(f"the model to begin with could not be made: {done.stderr[-500:]}")
    return folder / "export"


def kill_once(arguments: list[str], folder: Path, *, step: int, delay_s: float, start_s: float) -> tuple[int, bool] | None:
    """Start the run's command and kill it; returns the steps done and whether it was starting, None if it ended by itself."""
    life = Life(arguments)
    starting = num_steps(folder) >= step > 0
    try:
        if starting:
            time.sleep(start_s)
        else:
            while life.alive and num_steps(folder) < step:
                time.sleep(0.01)
            time.sleep(delay_s)
        if not life.alive:
            if life.command.exit_code:
                raise RuntimeError(f"the command ended by itself: {life.command.stderr.text[-1000:]}")
            return None
        return num_steps(folder), starting
    finally:
        life.kill()


def num_steps(folder: Path) -> int:
    """Steps that a run has written rows of; the first row is the evaluation before them."""
    return max(num_rows(folder) - 1, 0)


def finished(arguments: list[str], folder: Path, sitting: Sitting) -> Sitting:
    """Let the run come to its end, and replay it."""
    begun_s = time.monotonic()
    if num_steps(folder) < sitting.steps or not (folder / "result.json").exists():
        life = Life(arguments)
        try:
            life.end()
        finally:
            life.kill()
        if life.command.exit_code:
            return replace(sitting, problems=(f"the run did not come to its end: {life.command.stderr.text[-500:]}",))
    done = offbeat("replay", str(folder), "--json", timeout_s=_REPLAY_S)
    lines = [msgspec.json.decode(line) for line in done.stdout.splitlines()]
    steps = [each for each in lines if "global_step" in each]
    problems = [f"step {each['global_step']}: {each['difference']}" for each in steps if each["difference"]][:1]
    problems += [each["note"] for each in lines if "note" in each]
    if done.returncode == 2 or not steps:
        problems.append(done.stderr[-500:])
    return replace(
        sitting, replayed=len(steps), equal=sum(not each["difference"] for each in steps), problems=tuple(problems),
        metrics=sum(each["num_metrics"] for each in steps), weights=sum(each["has_weights"] for each in steps),
        checkpoints=sum(each["has_checkpoint"] for each in steps), exports=sum(each["has_export"] for each in steps),
        wall_s=round(sitting.wall_s + time.monotonic() - begun_s, 1))


def table(sittings: list[Sitting]) -> str:
    """The table of docs/replay.md."""
    rows = [
        "| run | what it is | kills, of them while it started | steps, equal | metrics | weights | checkpoints | final model | minutes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for each in sittings:
        if not each.is_done:
            rows.append(f"| {each.kind} | {KINDS[each.kind].about} | {len(each.at)} of {each.kills} so far | | | | | | |")
            continue
        final = "equal" if each.exports and each.is_equal else "differs" if each.exports else "none"
        rows.append(
            f"| {each.kind} | {KINDS[each.kind].about} | {len(each.at)}, {sum(starting for _, starting in each.at)} | {each.steps},"
            f" {each.equal} | {each.metrics} | {each.weights} | {each.checkpoints} | {final} | {each.wall_s / 60:.0f} |")
    told = [f"\n{each.kind}: {'; '.join(each.problems)}\n" for each in sittings if each.problems]
    return "\n".join(rows) + "\n" + "".join(told)


def spliced(page: str, text: str) -> str:
    """Put the table into the page, in place of the one before."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    sys.exit(main())
