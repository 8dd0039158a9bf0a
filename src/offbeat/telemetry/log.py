"""Logging of the controller and of every worker: each process writes `logs/<name>.log` in the run, one line per record.

Nothing goes to the terminal, which belongs to the console, unless `debug` asks for it.
"""

import logging
import sys
import time
from pathlib import Path

from offbeat.errors import StorageError

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"


def set_up_logging(path: Path | None, *, debug: bool = False) -> None:
    """Send this process's log records to a file, in place of wherever they went before. Times are UTC.

    Args:
        path: the file, appended to; None sends warnings (with `debug`, everything) to stderr.
        debug: record DEBUG of offbeat and INFO of libraries, and show it on stderr too; else INFO of offbeat and WARNING of libraries.

    Raises:
        StorageError: the file cannot be written.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    formatter = logging.Formatter(_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    for handler in _handlers(path, debug=debug):
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(logging.INFO if debug else logging.WARNING)
    logging.getLogger("offbeat").setLevel(logging.DEBUG if debug else logging.INFO)


def _handlers(path: Path | None, *, debug: bool) -> list[logging.Handler]:
    handlers: list[logging.Handler] = []
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(logging.FileHandler(path, encoding="utf-8"))
        except OSError as exc:
            raise StorageError(f"cannot write {path}: {exc.strerror}; free space or choose another folder with run.dir") from exc
    if path is None or debug:
        stderr = logging.StreamHandler(sys.stderr)
        stderr.setLevel(logging.DEBUG if debug else logging.WARNING)
        handlers.append(stderr)
    return handlers
