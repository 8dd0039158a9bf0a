"""Shortens tracebacks of the public functions to the program's own line and the sentence."""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from offbeat.errors import OffbeatError, UserError
from offbeat.raised import is_own

P = ParamSpec("P")
T = TypeVar("T")


def short_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Let errors that are raised on purpose leave a public function without the frames and causes inside of Offbeat.

    The traceback has the user's own frames, such as a callback's, one frame of this module, and the sentence; before it, an error in the
    user's own code that caused it; and for a failed run, notes with the last lines of its processes. The run's log has the rest.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except OffbeatError as exc:
            if isinstance(exc, UserError) and hasattr(exc, "__notes__"):
                del exc.__notes__  # they say where in Offbeat's processes it was raised
            cause = exc.__cause__
            own = None if cause is None or isinstance(cause, OffbeatError) else _own_frames(cause.__traceback__)
            raise exc.with_traceback(_own_frames(exc.__traceback__)) from (cause.with_traceback(own) if cause and own else None)

    return call


def _own_frames(found: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of Offbeat and of libraries."""
    if found is None:
        return None
    after = _own_frames(found.tb_next)
    if not is_own(found.tb_frame.f_code.co_filename):
        return after
    return TracebackType(after, found.tb_frame, found.tb_lasti, found.tb_lineno)
