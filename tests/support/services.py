"""A service whose workers fail in every way, for tests of what is told of it."""

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import PeerError, SyncTimeout
from offbeat.workers.worker import Nothing, WorkerService


@dataclass(frozen=True)
class Order:
    """Do `what`, after some seconds; "wait PATH" returns once that file exists."""

    what: str
    after_s: float = 0.0


class Actor(WorkerService):
    """Does as it is told."""

    def act(self, order: Order) -> Nothing:
        time.sleep(order.after_s)
        if order.what.startswith("wait "):
            while not Path(order.what.removeprefix("wait ")).exists():
                time.sleep(0.01)
        match order.what:
            case "raise":
                raise ValueError("no such token")
            case "raise peer error":
                raise PeerError("rank 1 failed at 'save'")
            case "raise verdict":
                raise SyncTimeout("rank 1 did not come to 'save' within 5 s\n  its stack")
            case "break":
                raise RuntimeError("[gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 40000ms")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hold the interpreter":
                ctypes.PyDLL(None).sleep(60)
            case "sleep":
                time.sleep(60)
        return Nothing()
