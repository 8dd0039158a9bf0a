"""Rows of the fault table: the real command, a rank that misbehaves, and what can be seen of it from outside.

The drills of a chain share a run folder: each command trains two steps more than are saved, so it is at once the resumption of the one
before.
"""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from faults.command import Command
from faults.points import ANSWER_TIMEOUT_S, HEADS, SYNC_TIMEOUT_S, WRITE_TIMEOUT_S, Drill
from offbeat.checkpoint.recover import CheckpointIndex
from small_run import ENVIRONMENT, SmallRun

GRACE_S = 2.0
"""Beyond the deadline, until the fault is named; and after the command's end, until all its processes are gone."""

_COMMAND_TIMEOUT_S = 75.0
_STRUCK = re.compile(r"injected \w+ at '.+' in rank \d+ at ([\d.]+)$", re.MULTILINE)
_TORCHRUN_TABLE = re.compile(r"^=+\n.* FAILED\n", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What a drill showed; one line of the results.

    Attributes:
        named_s: seconds from the moment at which the rank misbehaved until the survivor had named it, in its log or on stderr.
        told_s: the same until the command itself said so on stderr.
        deadline_s: how much of both the ranks had to wait for.
        named: the command's verdict, its first line.
        named_by: who named rank, point and cause: the survivor, the command's last lines.
        left: processes of the run that outlived the command by more than `GRACE_S`.
        resumed: a later command went on from the newest checkpoint.
        problems: what does not meet the promise; empty for a row that passes.
        wall_s: of the whole command.
    """

    mode: str
    rank: int
    point: str
    kind: str
    named_s: float | None
    told_s: float | None
    deadline_s: float
    named: str
    named_by: tuple[str, ...]
    exit_code: int | None
    left: int
    resumed: bool
    problems: tuple[str, ...]
    wall_s: float


class Chain:
    """Drills on one run folder.

    Attributes:
        pending: outcomes of drills that no later command has resumed from yet.
    """

    def __init__(self, root: Path, model: str, *, mode: str, heads: bool = False) -> None:
        """`root` may hold a run with a checkpoint already."""
        self.pending: list[Outcome] = []
        self._run = SmallRun(root, model)
        self._mode = mode
        self._heads = heads
        self._seen = 0

    def strike(self, drill: Drill) -> list[Outcome]:
        """Run a drill; returns the outcomes of earlier ones, now that it is known whether their run resumes."""
        before = self._newest()
        assert before, "drills strike in a run that resumes"
        command = self._command(before + 2, drill)
        command.run(timeout_s=_COMMAND_TIMEOUT_S, grace_s=GRACE_S)
        resumed = self._settle(before)
        self.pending.append(self._judge(drill, command))
        return resumed

    def go_on(self) -> list[Outcome]:
        """Train one step without a fault; returns outcomes as `strike`."""
        before = self._newest()
        command = self._command(before + 1)
        command.run(timeout_s=_COMMAND_TIMEOUT_S, grace_s=GRACE_S)
        assert command.exit_code == 0 and not command.left, f"a run without a fault failed:\n{command.stderr.text}{command.left}"
        return self._settle(before)

    def _settle(self, before: int) -> list[Outcome]:
        events = self._run.events("resumed")
        new, self._seen = events[self._seen :], len(events)
        if not new:  # The command did not come so far.
            return []
        # A step that was trained, but struck before it was saved, is redone from the journal.
        resumed = before <= new[-1]["global_step"] <= before + 1
        problems = () if resumed else (f"went on from step {new[-1]['global_step']} where {before} were saved",)
        settled = [replace(each, resumed=resumed, problems=each.problems + problems) for each in self.pending]
        self.pending.clear()
        return settled

    def _newest(self) -> int:
        newest = CheckpointIndex(self._run.folder / "checkpoints").newest()
        return newest.step if newest else 0

    def _command(self, total_steps: int, drill: Drill | None = None) -> Command:
        settings = {
            "run.total_steps": str(total_steps), "checkpoint.every_steps": "1", "evaluate.every_steps": "1", "telemetry.trace": "false",
            "dist.sync_timeout_s": str(SYNC_TIMEOUT_S), "dist.answer_timeout_s": str(ANSWER_TIMEOUT_S), "cluster.stop_timeout_s": "3"}
        if self._heads:
            settings |= HEADS
        start = [sys.executable, "-m"]
        if self._mode == "spmd":
            settings |= {"run.mode": "spmd", "checkpoint.timeout_s": str(WRITE_TIMEOUT_S), "weights.stage_timeout_s": str(WRITE_TIMEOUT_S)}
            start += ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        else:
            settings |= {"train.num_ranks": "2", "cluster.launcher": self._mode}
        env = ENVIRONMENT
        if drill is not None:
            settings |= drill.point.settings
            env = env | {"OFFBEAT_FAULT": f"rank={drill.rank},point={drill.point.name},kind={drill.kind},nth={drill.point.nth}"}
        arguments = self._run.arguments(**{name.replace(".", "__"): value for name, value in settings.items()})
        return Command(
            [*start, "offbeat", "train", *arguments], env=env, logs=[self._log(rank) for rank in (0, 1)],
            patterns=patterns(drill) if drill else {})

    def _log(self, rank: int) -> Path:
        return self._run.folder / "logs" / f"rank-{rank}.log"

    def _judge(self, drill: Drill, command: Command) -> Outcome:
        stderr, survivor = command.stderr, command.logs[self._log(drill.survivor)]
        struck = _STRUCK.search((stderr if drill.mode == "spmd" else command.logs[self._log(drill.rank)]).text)
        said = survivor.found_s("survivor"), stderr.found_s("survivor" if drill.mode == "spmd" else "note")
        told = stderr.found_s("first")
        named = [at for at in (*said, told if drill.point.inside else None) if at]  # who waits inside may have nothing to say
        last_words = self._last_words(stderr.text)
        wanted = patterns(drill)["command"]
        named_s, told_s = (round(at - float(struck[1]), 2) if struck and at else None for at in (min(named, default=None), told))
        named_by = [*([f"rank {drill.survivor}"] if named else []), *(["command"] if wanted.search(last_words) else [])]
        limit_s = drill.deadline_s + GRACE_S
        checks = {
            "the fault did not strike": struck is not None,
            "the command did not end" if command.exit_code is None else f"exit code {command.exit_code}": command.exit_code == 1,
            "the survivor did not name it": bool(named),
            "the last lines do not name it": "command" in named_by,
            f"the survivor named it after {named_s} s": named_s is None or named_s <= limit_s,
            f"the command named it after {told_s} s": told_s is None or told_s <= limit_s,
            f"processes left: {'; '.join(command.left)}": not command.left,
        }
        return Outcome(
            drill.mode, drill.rank, drill.point.name, drill.kind, named_s, told_s, drill.deadline_s, _verdict(stderr.text, drill),
            tuple(named_by), command.exit_code, len(command.left), resumed=False,
            problems=tuple(problem for problem, fine in checks.items() if not fine), wall_s=round(command.wall_s, 1))

    def _last_words(self, stderr: str) -> str:
        """From the command's last sentence on; torchrun ends with a table of its own."""
        if self._mode == "spmd":
            return stderr[table.start() :] if (table := _TORCHRUN_TABLE.search(stderr)) else ""
        return stderr[max(stderr.rfind("\noffbeat: "), 0) :]


def _verdict(stderr: str, drill: Drill) -> str:
    """The first line of what the command says of the culprit."""
    lines = [line.removeprefix("offbeat: ") for line in stderr.splitlines() if line.startswith("offbeat: ")]
    fitting = [line for line in lines if f"rank {drill.rank} " in line] or lines or [""]
    return re.sub(r"process \d+", "process N", re.sub(r"\d+\.\d s", "N s", fitting[0]))


def patterns(drill: Drill) -> dict[str, re.Pattern[str]]:
    """What names rank, point and cause, as the "survivor" and the "command" say it; "first", where the command begins to; and "note", where
    it quotes the survivor.
    """
    rank, point = f"rank {drill.rank}", re.escape(repr(drill.point.name))
    killed = "was killed by SIGKILL"
    if drill.point.inside:
        named = {"stop": rf"{rank} is stopped", "hang": rf"{rank} (hangs in .*\({drill.point.name}\)|is slow)"}[drill.kind]
        return {
            "survivor": re.compile(named), "command": re.compile(named), "first": re.compile(rf"^offbeat: .*{named}", re.MULTILINE),
            "note": re.compile(rf"^  rank {drill.survivor}: .*?({named})", re.MULTILINE)}
    # Its parent may collect a dead process before the survivor looks how it ended.
    survivor = command = {
        "exception": rf"{rank} failed\b.*injected at {point}",
        "slow": rf"sync point {point} timed out.*{rank} is slow|{rank} hangs in",  # the deadline of the point, or the rank's own
        "stop": rf"sync point {point} timed out.*{rank} is stopped|{rank} is stopped by",
        "kill": _dead(rank, point, f"({killed}|is gone)"),
        "mismatch": rf"{rank} came to '{drill.point.name} \(injected\)'",
    }[drill.kind]
    if drill.kind == "kill":
        # The survivor's sentence, which knows the point, beside what the process that started the dead one knows.
        table = rf"rank +: {drill.rank} .*\n +exitcode +: -9 .*SIGKILL"
        parent = rf"({table})" if drill.mode == "spmd" else rf"{rank} \(process \d+\) {killed}"
        command = rf"(?s:(?=.*{parent})(?=.*{survivor}))|{_dead(rank, point, killed)}"
    return {
        "survivor": re.compile(survivor), "command": re.compile(command),
        "first": re.compile(rf"^offbeat: .*{rank}\b", re.MULTILINE),
        "note": re.compile(rf"^  rank {drill.survivor}: .*?({survivor})", re.MULTILINE)}


def _dead(rank: str, point: str, how: str) -> str:
    """A rank that is not at a point when another dies says how far it has come itself."""
    return rf"(sync point {point} cannot be passed: {rank} {how}|{rank} {how}.*as far as sync point)"
