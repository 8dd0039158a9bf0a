"""Ends the processes of a local Ray after its controller was killed: Ray's own agents outlive their parent for half a minute.

It is a separate process, `python -m offbeat.workers.ray_reaper`. The controller holds its standard input open and writes process ids to
it, one per line. When the controller is gone, for any reason, it kills those processes and their children that still live, and ends.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterable

import psutil


class Reaper:
    """The controller's end of the pipe to the reaper process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offbeat.workers.ray_reaper"], stdin=subprocess.PIPE, start_new_session=True)

    def add(self, pids: Iterable[int]) -> None:
        """Watch over these processes, too."""
        assert self._process.stdin is not None, "it was started with a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"".join(b"%d\n" % pid for pid in pids))
            self._process.stdin.flush()

    def reap(self) -> None:
        """Kill the remaining processes, and return when that is done."""
        self._process.communicate()


def main() -> None:
    """Collect process ids until the end of standard input, then kill the processes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler sends it to all processes of a job, which may go on for a while
    processes = []
    for line in sys.stdin:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(int(line)))  # remembers the creation time, so that a reused pid is not killed
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


if __name__ == "__main__":
    main()
