"""The live page of a run, in a process beside it: `--dashboard` of commands that train, and `dashboard=True` of `offbeat.train`.

The process has no part in the run. It reads the files in the run's folder with a lower priority, and a page that cannot be served is a note
on the console. It ends with the run, however that ends. It executes `page_process`.

    LivePage._read    consumes the process's output; produces one line of the console; waits for the process to listen, or to end
"""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from offbeat.child_watch import log_tail
from offbeat.telemetry.console import Console

_CLOSE_S = 5.0


class LivePage:
    """The page of one run. Use as a context manager, which ends the process; `open` starts it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._process: subprocess.Popen[str] | None = None
        self._reading: threading.Thread | None = None
        self._told = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, console: Console) -> None:
        """Start the process, unless it has been started; the console announces its address, or the failure, when it is known.

        The run's folder has to be there. The process does not survive the thread that calls this.
        """
        if self._process is not None or not self._run_dir.is_dir():
            return
        log = self._run_dir / "logs" / "dashboard.log"
        try:
            log.parent.mkdir(exist_ok=True)
            with log.open("ab") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "offbeat.dashboard.page_process", str(self._run_dir), str(os.getpid())],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        except OSError as exc:
            console.announce(f"the live page cannot be started, and the run goes on without it: {exc.strerror or exc}")
            return
        read = (self._process, console, log, threading.current_thread())
        self._reading = threading.Thread(target=self._read, args=read, name="live page", daemon=True)
        self._reading.start()

    def close(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        assert self._reading is not None and process.stdin is not None, "a process has a reader and a standard input"
        with suppress(BrokenPipeError):
            process.stdin.close()
        if not self._told:
            process.kill()  # it is still loading libraries, and would see the end of its standard input only then
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reading.join()

    def _read(self, process: "subprocess.Popen[str]", console: Console, log: Path, starter: threading.Thread) -> None:
        assert process.stdout is not None, "it is a pipe"
        with process.stdout as lines:
            if url := lines.readline().strip():
                self._told = True
                console.announce(f"watch this run at {url}")
            elif self._process is process and starter.is_alive():  # otherwise the run has ended before the page was there
                why = (log_tail(log) or "it said nothing").strip().splitlines()[-1]
                console.announce(f"the live page has ended, and the run goes on without it: {why}")
