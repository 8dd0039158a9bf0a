"""Handlers for child processes in tests."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import cast

from offbeat.errors import ConfigError, StuckError
from offbeat.process.frames import HEADER, RESULT
from offbeat.process.serving import Lifeline, _Server


class Echo:
    """Answers with what it was given, and misbehaves on request."""

    def handle(self, method: str, payload: bytes) -> bytes:
        match method:
            case "echo":
                return payload
            case "pid":
                return str(os.getpid()).encode()
            case "env":
                return os.environ.get(payload.decode(), "").encode()
            case "sleep":
                time.sleep(float(payload))
                return b""
            case "say":
                print(payload.decode(), flush=True)
                return b""
            case "exit":
                print("last words", flush=True)
                os._exit(7)
            case "hold":
                ctypes.PyDLL(None).usleep(int(float(payload) * 1e6))
                return b""
            case "ours":
                raise ConfigError("x must be 1, got 2")
        raise KeyError(method)


class Parent:
    """Starts processes and ends them by SIGTERM, as user code may; answers with how they ended."""

    def handle(self, _method: str, _payload: bytes) -> bytes:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as program:
            program.terminate()
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        forked.start()
        forked.terminate()
        forked.join()
        return f"{program.returncode} {forked.exitcode}".encode()


class Watched(Echo):
    """Reaches its parent while it answers."""

    lifeline: Lifeline | None = None

    def handle(self, method: str, payload: bytes) -> bytes:
        assert self.lifeline is not None, "it was given before the first call"
        match method:
            case "stop":
                self.lifeline.beat("'stop' (the second half)")
                time.sleep(0.5)
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case "hang":
                threading.Timer(0.2, self.lifeline.give_up, [StuckError("rank 1 hangs in 'hang'")]).start()
                time.sleep(float(payload))
            case "hold":
                self.lifeline.beat("'hold'")
        return super().handle("echo" if method in ("stop", "hang") else method, payload)


class Crowd:
    """Answers many calls at a time."""

    def __init__(self) -> None:
        self._ended: list[str] = []

    async def handle(self, method: str, payload: bytes) -> bytes:
        match method:
            case "sleep":
                try:
                    await asyncio.sleep(float(payload))
                finally:
                    self._ended.append(payload.decode())
                return payload
            case "block":
                time.sleep(float(payload))  # noqa: ASYNC251 - that is the mistake
                return b""
            case "ended":
                return ",".join(self._ended).encode()
        raise KeyError(method)


class Broken:
    """Cannot be constructed."""

    def __init__(self) -> None:
        raise RuntimeError("no model here")


class Unruly(Watched):
    """Breaks the wire to its parent."""

    def handle(self, method: str, payload: bytes) -> bytes:
        server = cast("_Server", self.lifeline)
        match method:
            case "twice":
                server._frame(RESULT, server._call_id, b"first")
            case "garbage":
                server._connection.sendall(b"\xff" * HEADER.size)
            case "mute":
                server._connection.shutdown(socket.SHUT_WR)
                time.sleep(60)
            case _:
                return super().handle(method, payload)
        return b"second"
