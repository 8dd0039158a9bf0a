"""`offbeat serve` as a child process: start it, kill it, start it again on the same data."""

import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
MODEL_NAME = "offbeat/small"
_STARTED = re.compile(r"https?://[\w.]+:(\d+)")


class Server:
    """A server on a free port, which it keeps when it is started again."""

    def __init__(self, model: Path, folder: Path, *options: str) -> None:
        self._model = model
        self._folder = folder
        self._options = options
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def data(self) -> Path:
        return self._folder / "data"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        command = [
            PYTHON, "-m", "offbeat", "serve", "--model", self._model, "--model-name", MODEL_NAME, "--port", str(self.port),
            "--data-dir", self._folder / "data", "--max-lora-rank", "16", *self._options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        errors = (self._folder / "stderr.log").open("a")
        self.process = subprocess.Popen(
            [str(part) for part in command], cwd=self._folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := _STARTED.search(line):
                self.port = int(match[1])
                threading.Thread(target=self.process.stdout.read, daemon=True).start()  # so that it never waits for a reader
                return
        raise RuntimeError(f"the server did not start:\n{(self._folder / 'stderr.log').read_text()[-4000:]}")

    def stop(self) -> None:
        """As Ctrl-C does; and nothing may be left."""
        if self.process is None:
            return
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=120)
        self.process = None
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive, f"left behind: {alive}"

    def kill(self) -> None:
        """As a power cut does, for this process alone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def children(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)
