"""Which of several workers' errors is the root cause, and how the others are told beside it. Pure; called by `group.ask_all`.

One rank's failure makes its peers fail, too: their store is gone, a collective breaks, a sync point is not reached. What the run ends
with is the cause; the consequences become one short line each.
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
    """What an error says; the smaller, the likelier it explains the others."""

    RAISED = 0
    DIED = 1
    MISSED = 2  # a verdict on a sync point, or on a rank that is stuck, the same on every rank
    LOST_PEER = 3
    LATE = 4  # no more than that a wait took too long

    @property
    def is_consequence(self) -> bool:
        """Whether something else, in another worker, must be behind it."""
        return self >= Cause.LOST_PEER


def cause_of(error: Exception) -> Cause:
    """Tell from an error's class; what torch says of a lost peer has none of its own."""
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
    """The name of the worker whose error explains the others; among equals, the one that failed first, as `failures` is ordered."""
    return min(failures, key=lambda name: cause_of(failures[name]))


def consequences(failures: Mapping[str, Exception], *, root: str) -> list[str]:
    """One line for each other worker that failed; none for one that says the same as the root."""
    texts = {name: str(error) for name, error in failures.items() if name != root and str(error) != str(failures[root])}
    lines = {name: text.partition("\n")[0][:_MAX_LINE] for name, text in texts.items()}
    return [line if line.startswith(name) else f"{name}: {line}" for name, line in lines.items()]
