"""`offbeat.serve`: the service of `offbeat serve`, in a process of its own that a program starts, waits for and ends."""

import atexit
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

from offbeat.agents import launch
from offbeat.api.settings import Settings, configured
from offbeat.config.dump import toml_value
from offbeat.config.load import load_config
from offbeat.config.root import Config
from offbeat.errors import ConfigError, DeadlineError, RunError

_HOMES = ("serve", "inference", "train", "model")
_SERVING = re.compile(r"serving .* at (http://\S+);")
_START_TIMEOUT_S = 600.0
_CLOSE_TIMEOUT_S = 300.0
_KEPT_LINES = 200


class Service:
    """A service that runs, as `offbeat.serve` returns it.

        with offbeat.serve("models/small", name="mine/sorter") as service:
            print(service.url)
            service.wait()

    Attributes:
        url: address for clients, the value of TINKER_BASE_URL, such as "http://127.0.0.1:8000".
    """

    def __init__(self, process: "subprocess.Popen[str]", *, show: bool) -> None:
        """Wait until the process serves; `show` prints its output."""
        self.url = ""
        self._process = process
        self._lines: list[str] = []
        self._found: SimpleQueue[str] = SimpleQueue()
        self._reading = threading.Thread(target=self._read, args=(show,), name="offbeat service", daemon=True)
        self._reading.start()
        try:
            self.url = self._found.get(timeout=_START_TIMEOUT_S)
        except Empty:
            self._kill()
            raise DeadlineError(f"the service did not start within {_START_TIMEOUT_S:g} s; it said: {self._said()}") from None
        except BaseException:
            self._kill()
            raise
        if not self.url:
            code = process.wait()
            raise (ConfigError if code == 2 else RunError)(self._said())
        atexit.register(self.close)

    def wait(self) -> None:
        """Return when the service has ended; Ctrl-C, or interrupting the cell, ends it. Raises RunError if it ended by itself."""
        try:
            self._process.wait()
        except KeyboardInterrupt:
            self.close()
            return
        if self._process.returncode not in (0, 130):
            raise RunError(f"the service ended with exit code {self._process.returncode}; it said: {self._said()}")

    def close(self) -> None:
        """End the service: it finishes running requests and saves every model. Does nothing if it has ended."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_CLOSE_TIMEOUT_S)
            except BaseException:  # late, or interrupted once more
                self._kill()
                raise
        self._reading.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _said(self) -> str:
        """Return the service's last sentence."""
        told = [line.removeprefix("offbeat: ") for line in self._lines if line.startswith("offbeat: ")]
        return (told or self._lines or ["nothing"])[-1]

    def _read(self, show: bool) -> None:
        assert self._process.stdout is not None, "it has a pipe"
        with self._process.stdout as lines:
            for line in lines:
                self._lines = [*self._lines, line.rstrip()][-_KEPT_LINES:]
                if show:
                    print(line, end="", flush=True)
                if match := _SERVING.match(line):
                    self._found.put(match[1])
        self._found.put("")


def serve(
    model: str | os.PathLike[str], *, name: str = "", port: int = 0, keys: str | os.PathLike[str] | None = None,
    settings: Settings | None = None, progress: bool = True, **keywords: Any,
) -> Service:
    """Serve a base model to many clients of the public `tinker` SDK, as `offbeat serve` does, and return when it serves.

        with offbeat.serve("models/small", name="mine/sorter", data_dir="service-data") as service:
            os.environ.update(TINKER_BASE_URL=service.url, TINKER_API_KEY="tml-mine")
            client = tinker.ServiceClient()

    It ends with `close`, at the end of the `with` block, or with this program.

    Args:
        model: folder or hub id of the base model, its tokenizer included.
        name: model name for clients; "" for the folder's name.
        port: port to listen on; 0 takes a free one.
        keys: TOML file with owners and their API keys; None takes any key.
        settings, keywords: as of `train`; those of [serve] and [inference] are looked for first.
        progress: whether to print the service's output.

    Raises:
        UserError: an argument cannot work, in the service's own words.
        RunError: it did not start.
    """
    given = {"model.path": model, "serve.model_name": name or None, "serve.port": port, "serve.keys": keys}
    with configured(None, settings, keywords, homes=_HOMES, given=given, rows={}) as config:
        words = [word for key, value in _differing(config) for word in (f"--{key}", toml_value(value))]
    command = [sys.executable, "-m", "offbeat", "serve", "--model", config.model.path, *words]
    process = subprocess.Popen(
        [sys.executable, str(Path(launch.__file__)), str(os.getpid()), "0", *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True)  # so that a terminal's Ctrl-C comes from `close` alone
    return Service(process, show=progress)


def _differing(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the settings that differ from their defaults, but for the model, which is an argument of the command."""
    yield from _below(config.model_dump(), load_config(None).model_dump(), "")


def _below(values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and isinstance(defaults.get(name), dict) and defaults[name]:
            yield from _below(value, defaults[name], f"{key}.")
        elif value != defaults.get(name) and key != "model.path":
            yield key, value
