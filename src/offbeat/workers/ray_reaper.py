"""Ends the processes of a local Ray after its controller was killed: Ray's own agents outlive their parent for half a minute.

It is a separate process, `python -m offbeat.workers.ray_reaper MARK`. The controller holds its standard input open and writes process ids
to it, one per line. When the controller is gone, for any reason, it kills those processes, their children and all that bear the mark, a
variable in their environment, and ends. The mark is what tells of processes where the controller is killed before it knows them.
"""

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator

import psutil

_VARIABLE = "OFFBEAT_LOCAL_RAY"
_STARTED = b"started"
_LOOK_S = 0.25


class Reaper:
    """The controller's end of the pipe to the reaper process."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offbeat.workers.ray_reaper", self._mark], stdin=subprocess.PIPE, start_new_session=True)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Watch over the processes that are started in the body, and over those that they start, also later."""
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = self._mark
        try:
            yield
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before
            self._write(_STARTED)

    def add(self, pids: Iterable[int]) -> None:
        """Watch over these processes, too."""
        self._write(*(b"%d" % pid for pid in pids))

    def reap(self) -> None:
        """Kill the remaining processes, and return when that is done."""
        self._process.communicate()

    def _write(self, *lines: bytes) -> None:
        assert self._process.stdin is not None, "it was started with a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"".join(line + b"\n" for line in lines))
            self._process.stdin.flush()


def main() -> None:
    """Collect processes until the end of standard input, then kill them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler sends it to all processes of a job, which may go on for a while
    mark, watched, is_starting, rest = sys.argv[1], set[psutil.Process](), True, b""
    while True:
        if is_starting:
            watched |= _marked(mark)  # Ray's agents rename themselves a second after their start, which erases their environment
        if not select.select([0], [], [], _LOOK_S if is_starting else None)[0]:
            continue
        if not (data := os.read(0, 1 << 16)):
            break
        *lines, rest = (rest + data).split(b"\n")
        is_starting = is_starting and _STARTED not in lines
        for line in lines:
            if line != _STARTED:
                with contextlib.suppress(psutil.NoSuchProcess):
                    watched.add(psutil.Process(int(line)))  # remembers the creation time, so that a reused pid is not killed
    for process in watched | _marked(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def _marked(mark: str) -> set[psutil.Process]:
    """Return the processes that bear a mark."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_VARIABLE) == mark:
                found.add(process)
    return found


if __name__ == "__main__":
    main()
