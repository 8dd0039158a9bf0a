"""Notices that engines idle because all episodes that may be played wait for their environments. Pure; driven by the executor.

Environments that wait need more episodes at the same time, by a factor of (wait + generation) / generation.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WINDOW_S = 60.0
_TELL_SHARE = 0.3


class IdleHint:
    """Adds up for how long no engine was asked while groups ran and no more could be admitted."""

    def __init__(
        self, tell: Callable[[str], None], *, num_running: Callable[[], int], limit: Callable[[], str],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count.

        Args:
            tell: called once with the hint.
            num_running: number of groups that run.
            limit: the setting that keeps further groups from being admitted; "" while nothing does.
            now_s: a clock.
        """
        self._tell, self._num_running, self._limit, self._now_s = tell, num_running, limit, now_s
        self._num_calls = 0
        self._since_s = now_s()
        self._idle_s = self._busy_s = 0.0
        self._held_by = ""
        self._told = False

    def look(self) -> None:
        """Note that groups were admitted or have ended: the time up to here counts under what held before."""
        self._pass()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Count an engine as asked during the body."""
        self._pass()
        self._num_calls += 1
        try:
            yield
        finally:
            self._pass()
            self._num_calls -= 1

    def _pass(self) -> None:
        now_s, limit = self._now_s(), self._held_by
        passed_s, self._since_s = now_s - self._since_s, now_s
        self._held_by = self._limit() if self._num_running() else ""
        if not limit or self._told:
            return
        if self._num_calls:
            self._busy_s += passed_s
        else:
            self._idle_s += passed_s
        whole_s = self._idle_s + self._busy_s
        if whole_s < _WINDOW_S:
            return
        share = self._idle_s / whole_s
        self._idle_s = self._busy_s = 0.0
        if share > _TELL_SHARE:
            self._told = True
            factor = f"{1 / (1 - share):.1f} times" if share < 0.95 else "20 times or more"
            self._tell(
                f"engines had nothing to do for {share:.0%} of the last minute, as all groups waited for their environments; {limit} keeps"
                f" out more, and {factor} as many groups would keep the engines busy")
