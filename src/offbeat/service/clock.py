"""The service's clock: wall-clock time that never jumps while a server runs.

Expired checkpoints are deleted for good, so a system clock that is wrong for some seconds must not decide it. The wall clock is read once,
when the server starts, and goes on with the monotonic one, which stands still while a machine sleeps.
"""

import time

_WALL_S, _MONOTONIC_S = time.time(), time.monotonic()


def steady_time() -> float:
    """Return seconds since the epoch by this process's clock."""
    return _WALL_S + time.monotonic() - _MONOTONIC_S
