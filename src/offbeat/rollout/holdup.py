"""Detects user code that blocks the event loop: a workflow or filter that blocks instead of awaiting stops everything in its process.

    _look   a thread; consumes time; produces a signal when the loop has not run for long; waits only for its interval

The signal's handler runs in the main thread, on top of the code that blocks the loop. If user code called that code, the handler reports
where the loop is blocked, and raises an error there after the deadline. Otherwise it does nothing.
"""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from offbeat.errors import CodeError
from offbeat.types import Tell

_TELL_AFTER_S = 5.0
_SIGNAL = signal.SIGUSR2


class HoldupGuard:
    """Watches the running loop of the main thread while it is `on`. In other threads it does nothing, as signals do not arrive there."""

    def __init__(self, *, timeout_s: float, callers: tuple[CodeType, ...], tell: Tell) -> None:
        """`callers` are our functions that call user code. `tell` is called once with the place where the loop is blocked; code that blocks
        it for `timeout_s` seconds is interrupted.
        """
        self._timeout_s = timeout_s
        self._callers = callers
        self._tell = tell
        self._told = False
        self._interval_s = min(_TELL_AFTER_S, timeout_s) / 4
        self._num_looks = 0
        self._turning: asyncio.TimerHandle | None = None

    @property
    def _held_s(self) -> float:
        """Seconds since the loop last ran, by a count of looks, because a clock also runs while the process is stopped."""
        return self._num_looks * self._interval_s

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch the loop during the body; may be nested."""
        if self._turning is not None or threading.current_thread() is not threading.main_thread():
            yield
            return
        done = threading.Event()
        looking = threading.Thread(target=self._look, args=(done,), name="holdup guard", daemon=True)
        self._turn(asyncio.get_running_loop())
        before = signal.signal(_SIGNAL, self._handle)
        looking.start()
        try:
            yield
        finally:
            done.set()
            looking.join()  # no signal can come after this, when nobody would handle it
            signal.signal(_SIGNAL, before)
            if self._turning is not None:
                self._turning.cancel()
            self._turning = None

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_looks = 0
        self._turning = loop.call_later(self._interval_s, self._turn, loop)

    def _look(self, done: threading.Event) -> None:
        main = threading.main_thread().ident
        assert main is not None, "it runs"
        while not done.wait(self._interval_s):
            self._num_looks += 1
            if self._held_s > self._timeout_s or (self._held_s > _TELL_AFTER_S and not self._told):
                signal.pthread_kill(main, _SIGNAL)

    def _handle(self, _signal: int, frame: FrameType | None) -> None:
        held_s, holder = self._held_s, _user_frame(frame, self._callers)
        if holder is None:
            return
        where = f"{holder.f_code.co_filename}, line {holder.f_lineno}, in {holder.f_code.co_name}"
        if held_s > self._timeout_s:
            self._num_looks = 0  # if user code catches this, it has the same time again
            raise CodeError(f"it held up the whole process for {held_s:.1f} s at {where}; await there, or use asyncio.to_thread")
        if held_s > _TELL_AFTER_S and not self._told:
            self._told = True
            self._tell(f"nothing has happened for {held_s:.0f} s, because user code does not await at {where}; use asyncio.to_thread there")


def _user_frame(frame: FrameType | None, callers: tuple[CodeType, ...]) -> FrameType | None:
    """Return the innermost frame of user code called by one of `callers`, or None if there is none."""
    inner = None
    while frame is not None and frame.f_code not in callers:
        inner, frame = inner or frame, frame.f_back
    return inner if frame is not None else None
