"""What the benchmarks share: figures as JSON lines, and contestants that take turns.

A contestant is a child process that answers each JSON line on its stdin with one on its stdout, so that every side runs in its own
environment and one run can alternate between them: what else the machine does then falls on all alike. Standard library and psutil only,
because the peers' environments import it too.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil
from trees import cpu_s_of, tree_of

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
WORK = ROOT / "build" / "benchmarks"
"""Models and logs of the benchmarks; git ignores it."""

SOURCES = os.pathsep.join([str(ROOT / "src"), str(BENCHMARKS)])
"""PYTHONPATH of a contestant whose script lies in a folder below this one; Offbeat need not be installed."""


def emit(benchmark: str, case: str, *, ours: float, peer: float, unit: str, aim: float | None = None, less_is_better: bool = False) -> None:
    """Print one figure. `ratio` says how many times better ours is; without an aim there is nothing to meet, and `met` is null."""
    ratio = peer / ours if less_is_better else ours / peer
    line = {
        "benchmark": benchmark, "case": case, "ours": _rounded(ours), "peer": _rounded(peer), "ratio": round(ratio, 3), "unit": unit,
        "aim": aim, "met": None if aim is None else ratio >= aim}
    print(json.dumps(line), flush=True)


def note(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def take_turns(sides: Mapping[str, Callable[[int], Mapping[str, float]]], *, repeats: int, what: str) -> dict[str, dict[str, float]]:
    """Run all sides once per round, A B A B ..., and take medians.

    Args:
        sides: each a function from the number of the round to named figures.

    Returns:
        For each side the median of each of its figures.
    """
    seen: dict[str, list[Mapping[str, float]]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name, side in sides.items():
            seen[name].append(side(repeat))
            note(f"{what} round {repeat + 1}/{repeats} {name}: " + ", ".join(f"{k} {v:.4g}" for k, v in seen[name][-1].items()))
    return {name: {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]} for name, runs in seen.items()}


@dataclass(frozen=True)
class Answer:
    """What a contestant said, and the CPU seconds that it and its children spent on it."""

    values: dict[str, Any]
    cpu_s: float


class Contestant:
    """A child process that does jobs; see `answer_jobs` for its end of the pipe."""

    def __init__(self, name: str, command: Sequence[str | Path], *, env: Mapping[str, str]) -> None:
        self.name = name
        WORK.mkdir(parents=True, exist_ok=True)
        self.log = WORK / f"{name}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | dict(env), cwd=BENCHMARKS)
        self._tree = psutil.Process(self._process.pid)

    def ask(self, job: Mapping[str, Any], *, limit_s: float | None = None) -> Answer:
        """Do one job; a contestant that takes longer than `limit_s` is killed.

        Raises:
            RuntimeError: the contestant died; names its log, with its last line.
        """
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        before = self._cpu_s()
        with self._killed_after(limit_s):
            with suppress(BrokenPipeError):  # it has ended, and there will be no answer
                self._process.stdin.write(json.dumps(job) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            last = (self.log.read_text().strip().splitlines() or [""])[-1]
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}; see {self.log}: {last[:300]}")
        return Answer(json.loads(line), self._cpu_s() - before)

    @contextmanager
    def _killed_after(self, limit_s: float | None) -> Iterator[None]:
        if limit_s is None:
            yield
            return
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _cpu_s(self) -> float:
        total = 0.0
        for process in tree_of(self._tree):
            with suppress(psutil.NoSuchProcess):
                total += cpu_s_of(process)
        return total

    def close(self) -> None:
        """End the child and all that it started."""
        assert self._process.stdin is not None, "is a pipe"
        children = self._tree.children(recursive=True) if self._tree.is_running() else []
        with suppress(BrokenPipeError):  # what it was told last was never read
            self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, alive = psutil.wait_procs(children, 5)
        for process in alive:
            process.kill()


@contextmanager
def contest(contestants: Sequence[Contestant]) -> Iterator[dict[str, Contestant]]:
    """The contestants by name, once each has answered the job {"do": "ready"}; ends them all."""
    try:
        for contestant in contestants:
            start = time.monotonic()
            contestant.ask({"do": "ready"})
            note(f"{contestant.name} is ready after {time.monotonic() - start:.0f} s more")
        yield {contestant.name: contestant for contestant in contestants}
    finally:
        for contestant in contestants:
            contestant.close()


def claim_stdout() -> TextIO:
    """The pipe to the benchmark; what libraries print to stdout from now on goes to stderr, the contestant's log."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return pipe


def answer_jobs(pipe: TextIO, run: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """A contestant's main loop, until its stdin closes. The job {"do": "ready"} is answered here."""
    for line in sys.stdin:
        job = json.loads(line)
        answer = {} if job.get("do") == "ready" else run(job)
        pipe.write(json.dumps(answer) + "\n")
        pipe.flush()


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
