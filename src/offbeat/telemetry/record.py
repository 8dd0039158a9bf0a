"""All records of one run, opened and closed together: statistics, events, timeline, sampled rollouts and the console."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from offbeat.disk import remove_parts
from offbeat.errors import StorageError
from offbeat.telemetry.background import BackgroundSink
from offbeat.telemetry.console import Console
from offbeat.telemetry.evaluation_log import forget_evaluations, write_evaluation
from offbeat.telemetry.events import EventLog
from offbeat.telemetry.rollout_log import RejectedLine, RolloutLog
from offbeat.telemetry.run_lock import RunLock, lock_run
from offbeat.telemetry.sinks import JsonLinesSink, check_installed, open_sink
from offbeat.telemetry.stats import StatsLogger
from offbeat.telemetry.trace import Tracer

_log = logging.getLogger(__name__)


class RunRecord:
    """The growing files of a run directory, which one process holds at a time; `writes` says whether this one writes them."""

    writes = True

    def __init__(
        self, run_dir: Path, *, trace: bool, console: Console, sinks: Sequence[str] = (), settings: Mapping[str, Any] | None = None,
        rollouts_max_bytes: int | None = None,
    ) -> None:
        """Open everything below `run_dir`, creating it if necessary.

        Args:
            trace: whether to record a timeline.
            console: shows progress; closed with the rest.
            sinks: destinations of metrics besides `metrics.jsonl`: "tensorboard", "wandb", "trackio", "mlflow".
            settings: settings of the run, displayed by sinks that support it.
            rollouts_max_bytes: bound on the folder of rollouts; None is no bound.

        Raises:
            ConfigError: another process is running this run.
            MissingExtraError: a sink's package is not installed.
            StorageError: the folder cannot be written.
        """
        check_installed(sinks)
        self.run_dir = run_dir
        self.log_dir = run_dir / "logs"
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StorageError(f"cannot write the run folder {run_dir}: {exc.strerror}; free space or set run.dir") from exc
        self._lock: RunLock | None = lock_run(run_dir)
        for folder in (run_dir, run_dir / "evaluations"):  # `RolloutLog` cares for its own
            remove_parts(folder)
        self.events = EventLog(run_dir / "events.jsonl")
        self.tracer = Tracer(run_dir / "trace.json" if trace else None, tell=console.note)
        self._metrics = JsonLinesSink(run_dir / "metrics.jsonl")
        self.stats = StatsLogger([
            self._metrics,
            *(BackgroundSink(name, partial(open_sink, name, run_dir, settings or {}), on_drop=self._sink_dropped)
              for name in dict.fromkeys(sinks))])
        self.console = console
        self._rollout_log = RolloutLog(run_dir / "rollouts", most_bytes=rollouts_max_bytes)
        self._writer = ThreadPoolExecutor(1, "rollouts")
        self._stored: Future[Path] | None = None
        for mended in filter(None, (self.events.mended, self.tracer.mended, self._metrics.mended)):
            self.note("mended", mended)

    def note(self, kind: str, text: str) -> None:
        """Show a message about the run's files on the console, and record it as an event of this kind."""
        self.events.record(kind, text=text)
        self.console.note(text)

    def resume_after(self, global_step: int, *, repeats_row: bool = False) -> None:
        """Continue after this step: drop the records of later steps, which are repeated, and report how many earlier ones are missing.

        `repeats_row` says whether the row of this step is written again, too.
        """
        last_row = global_step - 1 if repeats_row else global_step
        self.stats.resume_at(last_row + 1)
        forget_evaluations(self.run_dir, after=global_step)
        self._rollout_log.resume_after(global_step)
        if num_lost := len(set(range(1, last_row + 1)) - self._metrics.steps):
            self.note("rows_lost", f"metrics.jsonl has no rows of {num_lost} of the {global_step} steps that are done")

    async def rollouts(self, step: int, lines: Iterable[bytes]) -> None:
        """Store the rollouts of a step, and those rejected since the last call, on a thread, as soon as the step before is stored.

        The thread also makes the JSON lines. Raises StorageError if the step before could not be stored.
        """
        await self.stored()
        self._stored = self._writer.submit(self._rollout_log.write, step, lines, self._rollout_log.take_rejected())

    def has_rollouts(self, step: int) -> bool:
        """Whether the rollouts of a step are stored, or have to be by another process."""
        return self._rollout_log.has(step)

    def begin_anew(self) -> None:
        """Drop the records of steps of an earlier start, which the run begins again."""
        if (self.run_dir / "metrics.jsonl").stat().st_size:
            self.resume_after(-1)

    def reject(self, num_tokens: int, line: RejectedLine) -> None:
        """Store a group that is not trained on with the next step; see `RolloutLog.reject`."""
        self._rollout_log.reject(num_tokens, line)

    async def evaluation(self, step: int, name: str, lines: Iterable[bytes]) -> None:
        """Store the answers to an evaluation set, "" for held-out prompts, on a thread, as `rollouts` does."""
        await self.stored()
        self._stored = self._writer.submit(write_evaluation, self.run_dir, step=step, name=name, lines=lines)

    async def stored(self) -> None:
        """Wait until all rollouts and answers are stored; raises StorageError if they could not be stored."""
        if self._stored is not None:
            await asyncio.wrap_future(self._stored)

    def _sink_dropped(self, name: str, reason: str) -> None:
        self.events.record("sink_dropped", sink=name, reason=reason)
        self.console.announce(f"{name} gets no more metrics: {reason}")

    @property
    def on_span(self) -> Callable[[str, str, float, float], None]:
        """Callback that adds (name, track, start_s, end_s) to the timeline."""
        return self.tracer.add

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        self._writer.shutdown()
        if self._stored is not None and (failure := self._stored.exception()) not in (None, error):
            _log.error("the last rollouts could not be stored: %s", failure)
        self.console.close()
        remove_empty_logs(self.log_dir)
        self.tracer.close()
        self.stats.close()
        self.events.close()
        if self._lock is not None:
            self._lock.close()


class SilentRecord(RunRecord):
    """Record of a rank that does not lead in SPMD mode: it accepts everything and stores nothing. The rank's log is in `log_dir`."""

    writes = False

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.log_dir = run_dir / "logs"
        self._lock = None
        self.events = EventLog(None)
        self.tracer = Tracer(None)
        self.stats = StatsLogger([])
        self.console = Console("quiet")
        self._writer = ThreadPoolExecutor(1)  # starts no thread before it has work
        self._stored = None

    def resume_after(self, global_step: int, *, repeats_row: bool = False) -> None:
        """Do nothing, since nothing was stored."""

    def begin_anew(self) -> None:
        """Do nothing, since nothing was stored."""

    def has_rollouts(self, step: int) -> bool:  # noqa: ARG002
        """Return True: the leader stores them."""
        return True

    async def rollouts(self, step: int, lines: Iterable[bytes]) -> None:
        """Store nothing."""

    def reject(self, num_tokens: int, line: RejectedLine) -> None:
        """Store nothing."""

    async def evaluation(self, step: int, name: str, lines: Iterable[bytes]) -> None:
        """Store nothing."""


def remove_empty_logs(folder: Path) -> None:
    """Remove the logs, in a folder and those below it, of processes that have ended and had nothing to say."""
    for log in folder.rglob("*.log"):
        with suppress(FileNotFoundError):
            if not log.stat().st_size:
                log.unlink()
