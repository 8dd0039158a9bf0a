"""Finds the root cause among the errors of several workers, and reports the others beside it. Pure; called by `worker.ask_all`.

One rank's failure makes its peers fail, too: their store is gone, a collective breaks, a sync point is not reached. The run ends with the
cause; each consequence is reported in one short line.
"""

import re
from collections.abc import Mapping
from enum import IntEnum

from offbeat.errors import DeadlineError, DeathError, PeerError, StuckError, SyncError

_TORCH_LOST_PEER = re.compile(
    r"gloo/transport|\b(DistNetworkError|DistStoreError|DistBackendError)\b|\bRuntimeError: .*(\bgloo\b|\bnccl\b|Operation timed out)",
    re.IGNORECASE)
_MAX_LINE = 300


class Cause(IntEnum):
    """Kinds of errors; the smaller the number, the more likely it explains the others."""

    RAISED = 0
    DIED = 1
    MISSED = 2  # a verdict on a sync point or on a stuck rank, the same on every rank
    LOST_PEER = 3
    LATE = 4  # says only that a wait took too long

    @property
    def is_consequence(self) -> bool:
        """Whether something else, in another worker, must be the cause."""
        return self >= Cause.LOST_PEER


def cause_of(error: Exception) -> Cause:
    """Classify an error by its class; torch's errors of a lost peer have no class of their own, so their text decides."""
    if isinstance(error, StuckError):
        return Cause.MISSED
    if isinstance(error, PeerError) or _TORCH_LOST_PEER.search(str(error)):
        return Cause.LOST_PEER
    if isinstance(error, SyncError):
        return Cause.MISSED
    if isinstance(error, DeadlineError):
        return Cause.LATE
    return Cause.DIED if isinstance(error, DeathError) else Cause.RAISED


def root_cause(failures: Mapping[str, Exception]) -> str:
    """Return the name of the worker whose error explains the others; among equals the first of `failures`."""
    return min(failures, key=lambda name: cause_of(failures[name]))


def consequences(failures: Mapping[str, Exception], *, root: str) -> list[str]:
    """Return one line for each other worker that failed, unless its error has the root's text."""
    texts = {name: str(error) for name, error in failures.items() if name != root and str(error) != str(failures[root])}
    lines = {name: text.partition("\n")[0][:_MAX_LINE] for name, text in texts.items()}
    return [line if line.startswith(name) else f"{name}: {line}" for name, line in lines.items()]
