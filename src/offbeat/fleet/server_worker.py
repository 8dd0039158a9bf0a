"""The process that owns one engine of another make: it starts the server, waits until it is ready, and ends together with it.

The server runs in a process group of its own, with all that it spawns. When this process is gone for any reason, a `ServerReaper` kills it.
"""

import os
import socket
import subprocess
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException

from offbeat.engine.options import EngineAddress
from offbeat.errors import EngineError, MachineError
from offbeat.fleet.server_reaper import ServerReaper
from offbeat.hosts import direct, open_directly
from offbeat.machine import PROMISED_DEVICES, has_devices
from offbeat.workers.worker import Nothing, WorkerService

_POLL_S = 0.25
_PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ServerStart:
    """Start a server process that takes --host and --port, with `env` added to the worker's, and wait until its /health answers."""

    command: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    host: str
    timeout_s: float
    key: str = field(default="", repr=False)


class ServerWorker(WorkerService):
    """Starts the server of one engine in a process group of its own, and ends when the server does."""

    def __init__(self) -> None:
        self._reaper: ServerReaper | None = None

    def start(self, request: ServerStart) -> EngineAddress:
        """Start the server and wait until it answers.

        Raises:
            EngineError: it cannot be executed, or did not answer in time. A server that ends takes this process with it.
            MachineError: it was promised devices, and the machine has none; a server built for CPUs would not mind.
        """
        if (promised := os.environ.get(PROMISED_DEVICES, "0")) != "0" and not has_devices():
            raise MachineError(
                f"the server was assigned inference.devices_per_engine = {promised}, and this machine has no accelerator; nvidia-smi says"
                " whether the driver works, and 0 serves on the CPU")
        address = f"{request.host}:{_free_port(request.host)}"
        self._launch(request, address)
        deadline = time.monotonic() + request.timeout_s
        while not _answers(f"http://{address}/health", request.key):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the server at {address} did not answer within {request.timeout_s:g} s; its log says what it does, and "
                    "inference.start_timeout_s gives it longer")
            time.sleep(_POLL_S)
        return EngineAddress(f"http://{address}")

    def ping(self, request: Nothing) -> Nothing:
        """Say that the process is alive."""
        return request

    def _launch(self, request: ServerStart, address: str) -> None:
        host, _, port = address.rpartition(":")
        command = [*request.command, "--host", host, "--port", port]
        try:
            env = os.environ | request.env | direct(os.environ, host)  # SGLang asks itself over HTTP when it starts
            server = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as exc:
            raise EngineError(f"{command[0]} cannot be executed: {exc.strerror}; run make vllm, or set inference.python") from exc
        self._reaper = ServerReaper(server.pid)
        # A server never ends by itself in good order; the reaper ends the processes that it leaves.
        threading.Thread(target=lambda: os._exit(server.wait() or 1), name="server", daemon=True).start()


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def _answers(url: str, key: str) -> bool:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with open_directly(urllib.request.Request(url, headers=headers), timeout_s=_PROBE_TIMEOUT_S) as response:
            return response.status == 200
    except (OSError, HTTPException):
        return False
