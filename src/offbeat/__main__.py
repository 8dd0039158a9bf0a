"""The `offbeat` command, also as `python -m offbeat`: the entry, which answers Ctrl-C from its first moment on, while libraries still load.

A command's own signal handlers begin with its event loop, where `asyncio` replaces these.
"""

import os
import signal
import sys
from types import FrameType

from offbeat.loading import load_module

_STDERR = 2


def main() -> int:
    """Run the command and return its exit code.

    SIGINT is answered also where a shell has started the command in the background with it ignored. SIGHUP is left as it is, for `nohup`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_at_once)
    _fill_closed_streams()
    code = 1
    try:
        # By name and not at the top: it takes a second in which Ctrl-C would show a traceback.
        code = load_module("offbeat.cli.main").main()
        return code
    finally:
        load_module("offbeat.ending").exit_within(code)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # all output is written, and only the interpreter has to end


def _fill_closed_streams() -> None:
    """Open closed standard streams (`offbeat train >&-`) on `os.devnull`, before a socket takes their numbers and receives printed text."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115 - as the others, it stays open
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(_STDERR, "w", encoding="utf-8")  # noqa: SIM115


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    """While a command starts, it has nothing to end or to save; an exception would have to get through the libraries that load."""
    os.write(2, b"offbeat: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
