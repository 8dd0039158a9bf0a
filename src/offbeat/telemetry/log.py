"""Logging of the controller and of every worker: each process writes a file in the run, such as `logs/controller.log`, one line per record.

Nothing goes to the terminal, which belongs to the console, unless `debug` asks for it. Services write JSON lines instead, in which all
records of one request carry its ID.
"""

import json
import logging
import sys
import time
from contextlib import suppress
from contextvars import ContextVar
from logging.handlers import RotatingFileHandler
from pathlib import Path

from offbeat.errors import StorageError

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"
_FILE_BYTES, _NUM_FILES = 32 * 2**20, 8

current_request: ContextVar[str] = ContextVar("current_request", default="")
"""ID of the request that the current task works on."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, the request's ID, and the fields in `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        row = {"time": round(record.created, 3), "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if request := current_request.get():
            row["request"] = request
        row |= getattr(record, "fields", {})
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False, default=str)


class _LogFile(logging.FileHandler):
    """Appends to a file that is made with the first record. A record that a full disk does not take is lost, and its writer goes on."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)


def set_up_logging(path: Path | None, *, debug: bool = False, as_json: bool = False) -> None:
    """Send this process's log records to a file, replacing all earlier handlers. Times are UTC.

    Args:
        path: the file, to be appended to; None sends warnings (with `debug`, everything) to stderr.
        debug: record DEBUG of offbeat and INFO of libraries, and show it on stderr too; else INFO of offbeat and WARNING of libraries.
        as_json: write JSON lines to `path`, and rotate the file when it is large; the oldest files are removed.

    Raises:
        StorageError: the file cannot be written.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    formatter = logging.Formatter(_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    for handler in _handlers(path, debug=debug, as_json=as_json):
        handler.setFormatter(JsonFormatter() if isinstance(handler, RotatingFileHandler) else formatter)
        root.addHandler(handler)
    root.setLevel(logging.INFO if debug else logging.WARNING)
    logging.getLogger("offbeat").setLevel(logging.DEBUG if debug else logging.INFO)


def _handlers(path: Path | None, *, debug: bool, as_json: bool) -> list[logging.Handler]:
    handlers: list[logging.Handler] = []
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:  # it can be written; but a process that says nothing leaves no file
                is_empty = not file.tell()
            if is_empty:
                path.unlink()
            handlers.append(
                RotatingFileHandler(path, maxBytes=_FILE_BYTES, backupCount=_NUM_FILES, encoding="utf-8", delay=True) if as_json
                else _LogFile(path, encoding="utf-8", delay=True))
        except OSError as exc:
            raise StorageError(f"cannot write {path}: {exc.strerror}; free space or choose another folder with run.dir") from exc
    if path is None or debug:
        stderr = logging.StreamHandler(sys.stderr)
        stderr.setLevel(logging.DEBUG if debug else logging.WARNING)
        handlers.append(stderr)
    return handlers
