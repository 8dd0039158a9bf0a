"""Becomes another program that ends with its parent and has a memory limit: `launch.py PARENT MEMORY_BYTES COMMAND...`.

Runs under any Python by itself, and imports nothing but the standard library, because agents start often.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the limits, then execute the command; exits with 127 if it is not there."""
    parent, memory_bytes, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(1)
    if int(memory_bytes):
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory_bytes), int(memory_bytes)))
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        sys.stderr.write(f"cannot run {command[0]!r}: {exc.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
