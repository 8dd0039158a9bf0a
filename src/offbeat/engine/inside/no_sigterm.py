"""Keeps SIGTERM from ending a server of another make. Runs in that engine's environment and imports nothing of `offbeat`.

Schedulers send the signal to all processes of a job, while the run still needs its engines to save; the run ends them by SIGKILL. A server
would set a handler of its own, so `signal.signal` is kept from that. The programs that start servers import this before all else, at
their top level: `multiprocessing` imports them in processes that it spawns, too.
"""

import signal
from typing import Any

_set = signal.signal


def ignore_sigterm() -> None:
    """Ignore SIGTERM from now on in this process and all that it starts, whatever handlers they set.

    The kernel ignores it: a handler in Python, even an empty one, would wake event loops, which then call their own handlers.
    """
    _set(signal.SIGTERM, signal.SIG_IGN)
    signal.signal = _set_another


def _set_another(number: int, handler: Any) -> Any:
    """Set the handler of any other signal, as `signal.signal` does."""
    return signal.getsignal(number) if number == signal.SIGTERM else _set(number, handler)
