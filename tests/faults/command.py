"""A command under observation: what it and its ranks wrote and when, how it ended, and which of its processes are still there."""

import os
import re
import subprocess
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

_LOOK_S = 0.02
_TREE_S = 0.25
_MARKER = "OFFBEAT_DRILL"


class Text:
    """What comes to be written somewhere, and when patterns were first found in it."""

    def __init__(self) -> None:
        self.text = ""
        self._found: dict[str, float] = {}

    def add(self, text: str, patterns: dict[str, re.Pattern[str]]) -> None:
        """Append, and look."""
        self.text += text
        for name, pattern in patterns.items():
            if name not in self._found and pattern.search(self.text):
                self._found[name] = time.time()

    def found_s(self, name: str) -> float | None:
        """Seconds since 1970 at which the pattern of this name was seen; None if never."""
        return self._found.get(name)


class Command:
    """One command, from its start to the end of all its processes.

    Attributes:
        stderr: its own and its children's.
        logs: what was appended to each of the given files meanwhile.
        exit_code: None when it had to be ended.
        wall_s: seconds from start to end.
        left: descriptions of processes that outlived it by the grace period.
    """

    def __init__(self, arguments: list[str], *, env: dict[str, str], logs: list[Path], patterns: dict[str, re.Pattern[str]]) -> None:
        self.stderr = Text()
        self.logs = {path: Text() for path in logs}
        self.exit_code: int | None = None
        self.wall_s = 0.0
        self.left: list[str] = []
        self._arguments = arguments
        self._offsets = {path: path.stat().st_size if path.exists() else 0 for path in logs}
        self._patterns = patterns
        self._tree: set[psutil.Process] = set()
        self._mark = uuid.uuid4().hex
        self._env = os.environ | env | {_MARKER: self._mark}

    def run(self, *, timeout_s: float, grace_s: float) -> None:
        """Run it; after `timeout_s` it is killed. What is left `grace_s` after its end is noted, and killed."""
        start = time.monotonic()
        process = subprocess.Popen(self._arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=self._env)
        assert process.stderr is not None, "it was started with a pipe"
        reader = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            looked_s = 0.0
            while process.poll() is None and time.monotonic() - start < timeout_s:
                self._read_logs()
                if time.monotonic() - looked_s > _TREE_S:
                    looked_s = time.monotonic()
                    self._grow_tree(process.pid)
                time.sleep(_LOOK_S)
            self.exit_code = process.poll()
        finally:
            process.kill()
            process.wait()
            self.wall_s = time.monotonic() - start
            self.left = self._end_rest(grace_s)
        reader.join(timeout=1)
        self._read_logs()

    def processes(self) -> list[psutil.Process]:
        """All of its processes that are alive; from any thread. Some of Ray's erase their environment, and the mark with it."""
        return self._alive()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.stderr.add(line, self._patterns)

    def _read_logs(self) -> None:
        for path, text in self.logs.items():
            if path.exists() and path.stat().st_size > self._offsets[path]:
                with path.open("rb") as file:
                    file.seek(self._offsets[path])
                    data = file.read()
                self._offsets[path] += len(data)
                text.add(data.decode(errors="replace"), self._patterns)

    def _grow_tree(self, pid: int) -> None:
        with suppress(psutil.NoSuchProcess):
            self._tree = self._tree.union(psutil.Process(pid).children(recursive=True))  # a new set, as other threads read the old one

    def _end_rest(self, grace_s: float) -> list[str]:
        give_up_s = time.monotonic() + grace_s
        while (rest := self._alive()) and time.monotonic() < give_up_s:
            time.sleep(_LOOK_S)
        names = []
        for each in rest:
            with suppress(psutil.NoSuchProcess):
                names.append(" ".join(each.cmdline())[:100] or each.name())
            with suppress(psutil.NoSuchProcess):
                each.kill()
        return names

    def _alive(self) -> list[psutil.Process]:
        return [each for each in {*self._tree, *self._marked()} if _is_alive(each)]

    def _marked(self) -> list[psutil.Process]:
        """Processes that have inherited this command's mark, and were not seen as its children."""
        mark = f"{_MARKER}={self._mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, psutil.NoSuchProcess):
                if mark in (folder / "environ").read_bytes():
                    found.append(psutil.Process(int(folder.name)))
        return found


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
