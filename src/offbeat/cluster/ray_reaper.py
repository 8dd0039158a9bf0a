"""Ends what a killed controller leaves of the Ray it started: Ray's own agents outlive their parent for half a minute.

A process of its own, `python -m offbeat.cluster.ray_reaper`, whose standard input the controller holds open and tells of processes, one
identifier a line. When the controller is gone, however it went, it kills what is still alive of them and of their children, and ends.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterable

import psutil


class Reaper:
    """The controller's end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offbeat.cluster.ray_reaper"], stdin=subprocess.PIPE, start_new_session=True)

    def add(self, pids: Iterable[int]) -> None:
        """Watch over these, too."""
        assert self._process.stdin is not None, "it was started with a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"".join(b"%d\n" % pid for pid in pids))
            self._process.stdin.flush()

    def reap(self) -> None:
        """Kill what is left, and return when it is done."""
        self._process.communicate()


def main() -> None:
    """Collect processes until the end of standard input, then kill."""
    processes = []
    for line in sys.stdin:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(int(line)))  # remembers the time of creation, so that a pid used again is not killed
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


if __name__ == "__main__":
    main()
