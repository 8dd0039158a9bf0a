"""What the process beside a run executes: `python -m offbeat.dashboard.page_process RUN_DIR PARENT`. Started by `beside.LivePage`.

It serves the page of one run, and prints its address once that can be opened. It ends at SIGTERM, and with its parent: the kernel kills it
then, and where the kernel does not do such a thing, the end of its standard input ends it.
"""

import asyncio
import os
import signal
import socket
import sys
from contextlib import closing
from pathlib import Path

from offbeat.dashboard.library import Library
from offbeat.dashboard.serving import PORT, serve, url_of
from offbeat.errors import OffbeatError
from offbeat.listening import bind
from offbeat.process.serving import die_with_parent

_NUM_PORTS = 20
_NICE = 10


def main() -> None:
    """Serve until the run ends."""
    run_dir, parent = sys.argv[1:]
    die_with_parent(int(parent))
    os.nice(_NICE)  # the run comes first
    try:
        with closing(Library([Path(run_dir)])) as library, closing(bind_next(PORT)) as listener:
            asyncio.run(_serve(library, listener))
    except OffbeatError as exc:
        sys.exit(str(exc))


async def _serve(library: Library, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    def parent_is_gone() -> None:
        loop.remove_reader(sys.stdin)
        signal.raise_signal(signal.SIGTERM)

    loop.add_reader(sys.stdin, parent_is_gone)  # nobody writes there, so it becomes readable at its end
    await serve(library, listener, ready=lambda: print(url_of(listener), flush=True))


def bind_next(port: int) -> socket.socket:
    """Listen on this machine at `port`, or the next one that is free; at any one if 20 in a row are taken.

    Raises:
        PortBusyError: no port is free.
    """
    for number in range(port, port + _NUM_PORTS):
        listener = None
        try:
            listener = bind("127.0.0.1", number, who="the live page")
            listener.listen()  # two processes may bind a port on which neither listens yet
            return listener
        except OSError:
            if listener is not None:
                listener.close()
    return bind("127.0.0.1", 0, who="the live page")


if __name__ == "__main__":
    main()
