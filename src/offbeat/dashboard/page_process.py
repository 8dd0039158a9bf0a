"""The process beside a run: `python -m offbeat.dashboard.page_process RUN_DIR PARENT`, started by `live_page.LivePage`.

It serves the page of one run, and prints its address once that can be opened. It ends when its standard input does, and with its parent,
on systems whose kernel kills it then. SIGTERM, which schedulers send to all processes of a job, does not end it.
"""

import asyncio
import os
import signal
import socket
import sys
from contextlib import closing
from pathlib import Path

from offbeat.dashboard.library import RunLibrary
from offbeat.dashboard.serving import PORT, page_url, serve_pages
from offbeat.errors import OffbeatError
from offbeat.listening import bind
from offbeat.process.serving import die_with_parent, outlive_sigterm

_NUM_PORTS = 20
_NICE = 10


def main() -> None:
    """Serve until the run ends."""
    run_dir, parent = sys.argv[1:]
    die_with_parent(int(parent))
    outlive_sigterm()
    os.nice(_NICE)  # the run comes first
    try:
        with closing(RunLibrary([Path(run_dir)])) as library, closing(bind_next(PORT)) as listener:
            asyncio.run(_serve(library, listener))
    except OffbeatError as exc:
        sys.exit(str(exc))


async def _serve(library: RunLibrary, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        loop.remove_reader(sys.stdin)
        signal.raise_signal(signal.SIGINT)

    loop.add_reader(sys.stdin, interrupt)  # nobody writes there, so it becomes readable at its end
    await serve_pages(library, listener, ready=lambda: print(page_url(listener), flush=True), until=[signal.SIGINT])


def bind_next(port: int) -> socket.socket:
    """Listen here at `port` or the next that is free, at any if 20 in a row are taken; raises PortBusyError if no port is free."""
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
