"""Boundaries to code that may raise anything: functions of users, chat templates, libraries that inspect what users gave, and work whose
result somebody waits for, who must hear of any error.

Their errors are caught in one of two ways, so that no caller has a broad `except` of its own: `Caught` keeps the error for its caller to
judge, and `told_as` makes a sentence of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from offbeat.errors import CodeError, describe

Kinds = tuple[type[BaseException], ...]


class Caught:
    """Keeps the error of its body instead of raising it.

    >>> with Caught() as caught:
    >>>     number = float(value)
    >>> if caught.error is not None:
    >>>     number = 0.0
    """

    def __init__(self, *kinds: type[BaseException], passes: Kinds = ()) -> None:
        """Keep errors of `kinds`, by default every `Exception`, but for those of `passes`."""
        self.error: BaseException | None = None
        self._kinds = kinds or (Exception,)
        self._passes = passes

    @property
    def failure(self) -> Exception | None:
        """The error, if it is neither an exit nor an interrupt."""
        return self.error if isinstance(self.error, Exception) else None

    def take(self) -> BaseException:
        """Return the error of a body that otherwise returned, and forget it: kept, it would keep the variables of the code that raised."""
        error, self.error = self.error, None
        assert error is not None, "the body returns or raises"
        return error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, exc: BaseException | None, _traceback: TracebackType | None) -> bool:
        if exc is None or not isinstance(exc, self._kinds) or isinstance(exc, self._passes):
            return False
        self.error = exc
        return True


@contextmanager
def told_as(begins: str, ends: str = "", *, passes: Kinds = ()) -> Iterator[None]:
    """Raise an error of the body as one sentence: `begins`, a description such as "ValueError: no idea", and `ends`.

    The sentence is a CodeError. `sys.exit` counts as an error; errors of the kinds in `passes` are raised as they are.
    """
    with Caught(Exception, SystemExit, passes=passes) as caught:
        yield
    if (exc := caught.error) is not None:
        raise CodeError(f"{begins}{describe(exc)}{ends}") from exc
