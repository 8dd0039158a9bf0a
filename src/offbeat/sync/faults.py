"""Deliberate faults for drills: OFFBEAT_FAULT="rank=1,point=save_recover,kind=stop" makes one rank misbehave at one sync point or place.

The variable is read once per rank when it joins. It applies to arrivals at points and to the places of `offbeat.pulse.progress` inside
regions. Kinds: `exception` raises; `slow` and `hang` sleep for an hour, the former in a phase that says so; `stop` and `kill` send SIGSTOP
or SIGKILL to the process; `mismatch` arrives under another name. `nth=2` strikes only at the second arrival; default 1. A line on stderr
says when it strikes, in seconds since 1970.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.errors import ConfigError
from offbeat.phase import phase
from offbeat.pulse import on_progress

VARIABLE = "OFFBEAT_FAULT"
_KINDS = ("exception", "slow", "hang", "stop", "kill", "mismatch")
_SLOW_S = 3600.0


@dataclass(frozen=True)
class Fault:
    """The rank that misbehaves, the kind of fault, and the point or place."""

    rank: int
    point: str
    kind: str
    nth: int = 1


def parse(text: str) -> Fault | None:
    """Parse a fault; None for an empty text. Raises ConfigError if a field is missing, unknown or invalid."""
    if not text:
        return None
    parts = [part.strip().partition("=") for part in text.split(",")]
    fields = {name: value for name, _, value in parts}
    try:
        fault = Fault(rank=int(fields.pop("rank")), point=fields.pop("point"), kind=fields.pop("kind"), nth=int(fields.pop("nth", "1")))
    except (KeyError, ValueError) as exc:
        raise _malformed(text) from exc
    if fields or fault.kind not in _KINDS or fault.rank < 0 or fault.nth < 1 or not fault.point:
        raise _malformed(text)
    return fault


def _malformed(text: str) -> ConfigError:
    return ConfigError(
        f"{VARIABLE} must be 'rank=R,point=NAME,kind=KIND' with KIND one of {', '.join(_KINDS)} and optionally ',nth=N', got {text!r}")


class FaultInjector:
    """Injects the fault of one rank, if it has one."""

    def __init__(self, rank: int, environment: Mapping[str, str] = os.environ) -> None:
        fault = parse(environment.get(VARIABLE, ""))
        self._fault = fault if fault is not None and fault.rank == rank else None
        self._seen = 0

    def arm(self) -> None:
        """Strike at the places of `progress`, too."""
        if self._fault is not None:
            on_progress(self.strike)

    def strike(self, name: str) -> str:
        """Misbehave if this is the arrival to strike at; returns the name to arrive under."""
        fault = self._fault
        if fault is None or fault.point != name:
            return name
        self._seen += 1
        if self._seen != fault.nth:
            return name
        sys.stderr.write(f"injected {fault.kind} at {name!r} in rank {fault.rank} at {time.time():.3f}\n")
        sys.stderr.flush()
        match fault.kind:
            case "exception":
                raise RuntimeError(f"injected at {name!r}")
            case "slow":
                with phase("injected delay"):
                    time.sleep(_SLOW_S)
            case "hang":
                time.sleep(_SLOW_S)
            case "stop":
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # sent to the process, it would stop this thread later
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "mismatch":
                return f"{name} (injected)"
        return name
