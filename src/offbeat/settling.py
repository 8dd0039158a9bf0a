"""Calls a function of anybody's for somebody who waits elsewhere, so that neither its result nor an error of any kind is lost.

Used by threads that run functions for others: `ending.Threads`, `aio.SideThread`, the engine's thread, the database's writer.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def settle(future: "Future[T]", function: Callable[[], T]) -> None:
    """Call a function and hand its result, or whatever it raises, to a future that nobody can cancel any more.

    Exits and interrupts count as errors, too: they are raised where the result is awaited, and the thread that called lives on.
    """
    try:
        result = function()
    except BaseException as exc:
        future.set_exception(exc)
    else:
        future.set_result(result)


def outcome_of(function: Callable[[], T]) -> "Future[T]":
    """Call a function; returns a finished future with its result or error, such as one whose `exception()` is an OSError."""
    future: Future[T] = Future()
    settle(future, function)
    return future
