"""All records of one run, opened and closed together: statistics, events, time line, sampled rollouts and the console."""

import fcntl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Self

from offbeat.errors import ConfigError, StorageError
from offbeat.telemetry.console import Console
from offbeat.telemetry.events import EventLog
from offbeat.telemetry.rollout_log import write_rollouts
from offbeat.telemetry.sinks import JsonLines
from offbeat.telemetry.stats import StatsLogger
from offbeat.telemetry.trace import Tracer


class RunRecord:
    """The files of a run directory that grow while it runs. One process at a time holds them."""

    def __init__(self, run_dir: Path, *, trace: bool, console: Console) -> None:
        """Open everything below `run_dir`, making it.

        Raises:
            ConfigError: another process is running this run.
            StorageError: the folder cannot be written.
        """
        self.run_dir = run_dir
        self.log_dir = run_dir / "logs"
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise StorageError(f"cannot write the run folder {run_dir}: {exc.strerror}; free space or set run.dir") from exc
        self._lock = lock_run(run_dir)
        self.events = EventLog(run_dir / "events.jsonl")
        self.tracer = Tracer(run_dir / "trace.json" if trace else None)
        self.stats = StatsLogger([JsonLines(run_dir / "metrics.jsonl")])
        self.console = console

    def rollouts(self, step: int, lines: Iterable[bytes]) -> None:
        """Keep a sample of rollouts, already encoded as JSON lines."""
        write_rollouts(self.run_dir / "rollouts", step=step, lines=lines)

    @property
    def on_span(self) -> Callable[[str, str, float, float], None]:
        """Adds (name, track, start_s, end_s) to the time line."""
        return self.tracer.add

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.console.close()
        self.tracer.close()
        self.stats.close()
        self.events.close()
        self._lock.close()


def lock_run(run_dir: Path) -> IO[str]:
    """Take a run's folder for this process, until the returned file is closed.

    Raises:
        ConfigError: another process is running this run.
        StorageError: the folder cannot be written.
    """
    try:
        lock = (run_dir / "lock").open("w")
    except OSError as exc:
        raise StorageError(f"cannot write the run folder {run_dir}: {exc.strerror}; free space or set run.dir") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        lock.close()
        raise ConfigError(f"the run {str(run_dir)!r} is being run by another process; wait for it, or set run.name") from exc
    return lock
