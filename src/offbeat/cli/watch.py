"""`offbeat watch [PATH ...]`: serves the live page of runs, with their curves, time lines and rollouts."""

import argparse
import asyncio
import secrets
from contextlib import closing
from pathlib import Path

from offbeat.cli.keys import read_key
from offbeat.dashboard.library import RunLibrary
from offbeat.dashboard.serving import PORT, page_url, serve_pages
from offbeat.errors import ConfigError
from offbeat.hosts import is_loopback
from offbeat.listening import bind

DESCRIPTION = """\
Serve a web page about runs, during and after training: curves, time line, processes, events, configuration, a comparison of runs, and every
rollout that was kept, with filters and token by token. The page follows the files in the runs' folders and writes nothing except an index
of the rollouts, which it keeps beside them. A command that trains serves the page of its own run with --dashboard.

Only programs of this machine can open it. With another --host it requires a key: that of --key-file or $OFFBEAT_API_KEY, or else a new one,
which is part of the printed address. To see a run of another machine, forward the port: ssh -L 8765:localhost:8765 MACHINE
"""

EXAMPLES = """\
examples:
  offbeat watch                     all runs in runs/
  offbeat watch runs/my-run
  offbeat watch runs/a runs/b --port 0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="PATH", nargs="*", type=Path, help="a run's folder, or a folder of runs (default: runs)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; one that other machines can reach needs a key")
    parser.add_argument("--port", type=int, default=PORT, help=f"port to listen on; 0 chooses a free one (default: {PORT})")
    parser.add_argument("--key-file", metavar="FILE", help="file with the required key (default: $OFFBEAT_API_KEY)")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; raises ConfigError for a bad option, DataError for a missing folder, PortBusyError for a taken port."""
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {args.port}")
    is_local = is_loopback(args.host)
    key = read_key(args.key_file) if args.key_file is not None or not is_local else ""
    if not key and not is_local:
        key = secrets.token_urlsafe(24)
    with closing(RunLibrary(args.paths or [Path("runs")])) as library:
        with closing(bind(args.host, args.port, who="the live page", another="another --port")) as listener:

            def tell() -> None:
                url = page_url(listener, key=key)
                print(f"watching {', '.join(library.runs()) or 'for a run to begin'} at {url}; Ctrl-C ends it", flush=True)

            asyncio.run(serve_pages(library, listener, key=key, ready=tell))
    return 0
