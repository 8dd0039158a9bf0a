"""Ends what a killed controller leaves of the Ray it started: Ray's own agents outlive their parent for half a minute.

A process of its own, `python -m offbeat.cluster.ray_reaper PID ...`, whose standard input the controller holds open. When the controller is
gone, however it went, it kills what is still alive of the given processes, and ends.
"""

import contextlib
import subprocess
import sys

import psutil


def start_reaper() -> subprocess.Popen[bytes]:
    """Watch over all present descendants of this process."""
    descendants = psutil.Process().children(recursive=True)
    command = [sys.executable, "-m", "offbeat.cluster.ray_reaper", *(str(process.pid) for process in descendants)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def main() -> None:
    """Wait for the end of standard input, then kill."""
    processes = []
    for pid in sys.argv[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(int(pid)))  # remembers the time of creation, so that a pid used again is not killed
    sys.stdin.buffer.read()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()
