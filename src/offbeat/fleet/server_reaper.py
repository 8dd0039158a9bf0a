"""Ends the remaining processes of a server when its worker is gone, for any reason.

It is a separate process, `python -m offbeat.fleet.server_reaper GROUP`. The worker holds its standard input open; when that ends, it
kills the server's process group. Python's resource trackers go last: they remove the group's shared memory after its other processes.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

_TRACKER = "multiprocessing.resource_tracker"
_TRACKER_TIMEOUT_S = 5.0
_POLL_S = 0.02


class ServerReaper:
    """The worker's end of the pipe. The group is killed when this object, or its process, is gone."""

    def __init__(self, group: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offbeat.fleet.server_reaper", str(group)], stdin=subprocess.PIPE, start_new_session=True)


def members(group: int) -> list[psutil.Process]:
    """Return the living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def reap(group: int) -> None:
    """Kill a process group, leaving its resource trackers a moment to clean up."""
    trackers = [process for process in members(group) if _is_tracker(process)]
    for process in members(group):
        if process not in trackers:
            with suppress(psutil.Error):
                process.kill()
    deadline = time.monotonic() + _TRACKER_TIMEOUT_S
    while members(group) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _is_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(_TRACKER in word for word in process.cmdline())
    return False


def main() -> None:
    """Wait for the end of standard input, then reap."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler sends it to all processes of a job, and the worker may need the server
    sys.stdin.read()
    reap(int(sys.argv[1]))


if __name__ == "__main__":
    main()
