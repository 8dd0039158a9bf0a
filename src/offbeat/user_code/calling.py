"""Calls the code of users in their processes, so that it may be asynchronous or block, and so that its errors say where they come from."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from offbeat.errors import CodeError, describe
from offbeat.raised import describe_at
from offbeat.user_code.boundary import Caught

_UNHELD = (StopIteration, SystemExit, KeyboardInterrupt)
"""Exceptions that no future can hold, or that end the event loop when they are taken out of one."""


class EndedError(Exception):
    """User code tried to end its process."""


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call user code: a coroutine function on this loop, any other function in a thread of its own, as it may block.

    A thread is waited for even if this is cancelled, since nothing can end it; a process whose threads do not end is replaced. Raises
    EndedError where the code called sys.exit, which would otherwise end the event loop and all episodes of the process.
    """
    try:
        return await _call(function, *arguments, **named)
    except (SystemExit, KeyboardInterrupt) as exc:
        raise EndedError(describe(exc)) from exc


async def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(*arguments, **named)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        result = None
        with Caught(BaseException) as caught:
            result = function(*arguments, **named)
        error = EndedError(describe(caught.error)) if isinstance(caught.error, _UNHELD) else caught.error
        loop.call_soon_threadsafe(set_done, result, error)

    def set_done(result: Any, error: BaseException | None) -> None:
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    threading.Thread(target=work, name=getattr(function, "__name__", "user code"), daemon=True).start()
    cancelled = False
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        done.exception()  # marks the error as seen
        raise asyncio.CancelledError
    result = done.result()
    return await result if inspect.isawaitable(result) else result


def blame(exc: BaseException, name: str) -> CodeError:
    """Return the error for an exception of user code, with its place."""
    return CodeError(f"{name} raised {describe_at(exc)}")
