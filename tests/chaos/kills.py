"""Which processes of a run are killed, and when; and the run that is killed: one command after another in one folder."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from chaos.tokens import environment
from faults.command import Command
from offbeat.data.tokenizer import DEFAULT_ALPHABET, character_tokenizer
from offbeat.model.tiny import build_tiny
from small_run import ENVIRONMENT, REWARDS, SETTINGS, TINY, SmallRun

PLAYING = Path(__file__).parents[1] / "support" / "playing.py"
GRACE_S = 15.0
"""Seconds after which nothing of a command that has ended may be there; workers notice the end of their parent by themselves."""

EVALUATE_EVERY = 4
_START_S = 600.0
_MOMENT_S = 20.0
_GO_ON_S = 300.0
_END_S = 300.0
_LOOK_S = 0.003
_ALL_S = 3.0
_FATAL = 0.4
"""Share of kills that end a command; a start of a command takes most of the time."""
_MOST_STEPS = 15
"""Most steps between two kills of a command, and half of it on average."""
_MANY_CHARACTERS = "".join(map(chr, range(0x4E00, 0x4E00 + 900)))

COMMON = {
    "checkpoint.every_steps": "7", "checkpoint.keep": "2", "evaluate.every_steps": str(EVALUATE_EVERY), "weights.keep": "2",
    "rollout.max_concurrent_rollouts": "8", "rollout.max_new_tokens": "160", "telemetry.trace": "false", "inference.num_engines": "1",
    "rollout.reward": f"{REWARDS}:now_and_then_slow", "checkpoint.journal_keep": "all", "checkpoint.export": "false",
    "checkpoint.journal_running_s": "0.01", "inference.seeded_requests": "true",
    "inference.probe_interval_s": "0.5", "rollout.reward_workers": "1", "cluster.start_timeout_s": "600",
    "inference.start_timeout_s": "600", "dist.sync_timeout_s": "300"}
MODES: dict[str, dict[str, str]] = {
    "local": {"train.num_ranks": "2", "inference.num_engines": "2", "rollout.reward_workers": "2"},
    "lora": {"model.lora.rank": "4"},
    "spmd": {"run.mode": "spmd"},
    "spmd, all draw": {"run.mode": "spmd", "rollout.single_rank_load": "false", "rollout.balance_batch": "false"},
    "agents": {
        "rollout.workflow": "gym", "agent.environment": f"{PLAYING}:Digits", "agent.processes": "2", "rollout.max_new_tokens": "60"},
    "ray": {"cluster.launcher": "ray"}}
MOMENTS = ("start-up", "any time", "publish", "save", "evaluation", "rename")
HEALED = ("engine", "reward", "agent")
"""What is replaced while the run goes on."""


def build_model(folder: Path) -> str:
    """Write the smallest model with a vocabulary that is so large that its answers seldom end before they are as long as they may be."""
    tokenizer = character_tokenizer(DEFAULT_ALPHABET + _MANY_CHARACTERS)
    tokenizer.save(folder)
    build_tiny(
        folder, tiny=TINY.model_copy(update={"max_positions": 256}), vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, seed=1)
    return str(folder)


def tokens_of_group(mode: str) -> int:
    """Most tokens that a group of a mode may generate."""
    settings = SETTINGS | COMMON | MODES[mode]
    return int(settings["rollout.group_size"]) * int(settings["rollout.max_new_tokens"]) * (2 if mode == "agents" else 1)


@dataclass(frozen=True)
class Kill:
    """What is killed, and when.

    Attributes:
        victims: "command" is every process at once, as a batch system does it; of the others one, and of two equal ones two.
        moment: one of `MOMENTS`.
        delay_s: after the command's start, or after a step, for the first two of them.
        after_steps: steps that the command does before the moment is waited for; it is not waited for at start-up.
    """

    victims: tuple[str, ...]
    moment: str
    delay_s: float
    after_steps: int = 1

    @property
    def is_healed(self) -> bool:
        """Whether the run may go on; it has to, unless two are killed, or it has only just been started."""
        return all(each in HEALED for each in self.victims)


@dataclass(frozen=True)
class Struck:
    """What came of a kill.

    Attributes:
        was: the moment that was met, which is "any time" where the wanted one did not come.
        names: the processes that were killed.
        went_on: whether steps were done afterwards by the same command.
        exit_code: None while the command goes on, or when it had to be ended.
        problems: what was not as promised.
    """

    was: str
    names: tuple[str, ...]
    went_on: bool
    exit_code: int | None
    problems: tuple[str, ...]


def draw(chance: random.Random, mode: str, *, first: bool) -> Kill:
    """Draw a kill; `first` if the command has just been started."""
    healed = ["reward", "agent"] if mode == "ray" else ["engine", "reward", "agent"]
    healed = [each for each in healed if each == "engine" or (each == "agent") == (mode == "agents")]
    fatal = ["command", "controller"] if mode == "ray" else ["command", "controller", "rank"]
    pairs = [(one, other) for one in (*fatal[1:], *healed) for other in healed] if healed else []
    alone = [(each,) for each in ((*fatal, "command") if chance.random() < _FATAL else healed)]
    victims = chance.choice([*alone, chance.choice(pairs)] if pairs else alone)
    moment = chance.choice([each for each in MOMENTS if first or each != "start-up"])
    delay_s = chance.uniform(0.1, 6.0) if moment == "start-up" else chance.uniform(0.0, 1.5)
    return Kill(victims, moment, delay_s, chance.randint(1, _MOST_STEPS))


def role_of(process: psutil.Process) -> str:
    """The name of a process in its run, such as "rank 0"; "" if it is none that can be chosen."""
    with suppress(psutil.Error, IndexError):
        words = process.cmdline()
        if "offbeat.process" in words:
            name = words[words.index("offbeat.process") + 2]
            return name.replace("play", "agent") if name.split()[0] in ("rank", "engine", "reward", "play") else ""
        if words[1:4] == ["-m", "offbeat", "train"] or words[2:5] == ["-m", "offbeat", "train"]:
            return f"rank {process.environ()['RANK']}" if "spmd" in words else "controller"
        if "torch.distributed.run" in words:
            return "controller"
    return ""


def kill_all(command: Command) -> bool:
    """Kill all processes of a command, those that begin meanwhile, too; returns whether there was one."""
    end_s, found = time.monotonic() + _ALL_S, False
    while (processes := command.processes()) and time.monotonic() < end_s:
        found = True
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    return found


class Life:
    """One command: it is started, processes of it are killed, and it ends."""

    def __init__(self, run: SmallRun, mode: str, **settings: str) -> None:
        given = {name.replace(".", "__"): value for name, value in (COMMON | MODES[mode] | settings).items()}
        start = [sys.executable, "-m"]
        if mode.startswith("spmd"):
            start += ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        self.run = run
        env = ENVIRONMENT | environment(run.root / "tokens")
        self.command = Command([*start, "offbeat", "train", *run.arguments(**given)], env=env, logs=[], patterns={})
        self._thread = threading.Thread(target=self.command.run, kwargs={"timeout_s": 1800.0, "grace_s": GRACE_S}, daemon=True)
        self._start_s = time.monotonic()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the command runs, or what is left of it is waited for."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Wait until the command has ended and nothing of it is left."""
        self._thread.join()

    def end_now(self) -> None:
        """Kill all of its processes."""
        self._kill(("command",))
        self.end()

    def stop_after(self, num_steps: int) -> int | None:
        """Ask the run to end after so many steps, as a batch system does, and wait; returns its exit code."""
        self._until(lambda: num_rows(self.run.folder) > num_steps, _START_S)
        for process in self.command.processes():
            if role_of(process) == "controller":
                process.terminate()
        self.end()
        return self.command.exit_code

    @property
    def said(self) -> str:
        """What the command said last of what went wrong; `torchrun` says much besides."""
        lines = self.command.stderr.text.splitlines()
        return "; ".join([line for line in lines if line.startswith("offbeat:")][-3:] or lines[-5:])[-600:]

    def strike(self, kill: Kill) -> Struck:
        """Kill, and wait until the run goes on or has ended."""
        met = self._wait_for(kill)
        rows = num_rows(self.run.folder)
        names = self._kill(kill.victims)
        if kill.is_healed and names and "command" not in names:
            went_on = self._until(lambda: num_rows(self.run.folder) > rows, _GO_ON_S)
            if self.alive or (len(kill.victims) == 1 and met != "start-up"):
                problems = () if went_on else ("it did not go on",)
                return Struck(met, names, went_on, None if self.alive else self.command.exit_code, problems)
        ended = self._until(lambda: False, _END_S) or not self.alive
        if not ended:
            for process in self.command.processes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.end()
        problems = () if ended else ("the command did not end",)
        if self.command.left:
            problems += (f"left: {'; '.join(self.command.left)}",)
        return Struck(met, names, went_on=False, exit_code=self.command.exit_code, problems=problems)

    def _kill(self, victims: Sequence[str]) -> tuple[str, ...]:
        """Send SIGKILL; returns the names of what was hit."""
        named = [(role, each) for each in self.command.processes() if (role := role_of(each))]
        chosen: list[tuple[str, psutil.Process]] = []
        for victim in victims:
            chosen += [pair for pair in named if pair[0].startswith(victim) and pair not in chosen][:1]
        if "command" in victims or not chosen:  # or it has not come so far
            return ("command",) if kill_all(self.command) else ()
        for _, process in chosen:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return tuple(name for name, _ in chosen)

    def _wait_for(self, kill: Kill) -> str:
        folder = self.run.folder
        if kill.moment == "start-up":
            time.sleep(kill.delay_s)
            return kill.moment
        rows = num_rows(folder)
        self._until(lambda: num_rows(folder) >= rows + kill.after_steps, _START_S)
        if kill.moment == "any time":
            time.sleep(kill.delay_s)
            return kill.moment
        return kill.moment if self._until(_moment(kill.moment, folder), _MOMENT_S) else "any time"

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for the condition; False where the command has ended before, or in time."""
        end_s = time.monotonic() + timeout_s
        while self.alive and time.monotonic() < end_s:
            if condition():
                return True
            time.sleep(_LOOK_S)
        return False


def num_rows(folder: Path) -> int:
    """Number of rows of metrics."""
    path = folder / "metrics.jsonl"
    with suppress(FileNotFoundError):
        size = path.stat().st_size
        known_size, num = _rows.get(path, (-1, 0))
        if size != known_size:
            _rows[path] = size, (num := path.read_bytes().count(b"\n"))
        return num
    return 0


_rows: dict[Path, tuple[int, int]] = {}
"""Sizes of files and numbers of their rows, since they are asked for hundreds of times a second."""


def parts(folder: Path) -> Iterator[Path]:
    """Files that have been begun and do not have their names yet."""
    for name in ("", "rollouts/", "evaluations/", "checkpoints/*/", "checkpoints/*/ranks/", "weights/*/"):
        with suppress(FileNotFoundError):  # a folder that is removed meanwhile
            yield from folder.glob(f"{name}.*.part")


def _moment(name: str, folder: Path) -> Callable[[], bool]:
    weights = {path.name for path in (folder / "weights").glob("*")}

    def evaluates() -> bool:
        stored = max((int(path.name[5:11]) for path in (folder / "rollouts").glob("step-*.zst")), default=0)
        return stored > 0 and stored % EVALUATE_EVERY == 0 and f'"global_step": {stored},'.encode() not in _last_row(folder)

    return {
        "publish": lambda: any(path.name not in weights for path in (folder / "weights").glob("*")),
        "save": lambda: any(not (path / "complete.json").exists() for path in (folder / "checkpoints").glob("step-*")),
        "evaluation": evaluates,
        "rename": lambda: any(True for _ in parts(folder))}[name]


def _last_row(folder: Path) -> bytes:
    with suppress(FileNotFoundError, IndexError):
        return (folder / "metrics.jsonl").read_bytes().splitlines()[-1]
    return b""
