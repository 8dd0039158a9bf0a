"""Handlers for child processes in tests."""

import ctypes
import os
import time

from offbeat.errors import ConfigError


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
            case "exit":
                print("last words", flush=True)
                os._exit(7)
            case "hold":
                ctypes.PyDLL(None).usleep(int(float(payload) * 1e6))
                return b""
            case "ours":
                raise ConfigError("x must be 1, got 2")
        raise KeyError(method)


class Broken:
    """Cannot be constructed."""

    def __init__(self) -> None:
        raise RuntimeError("no model here")
