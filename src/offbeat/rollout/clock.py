"""The deadline of an episode. It stands still while rewards are computed: each of their calls has a deadline of its own, and what a group
waits for before them is other groups' rewards. A reward that hangs now and then would else cost the prompts that wait behind it.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import Self, TypeVar

from offbeat.errors import DeadlineError

T = TypeVar("T")


class EpisodeClock:
    """Bounds its body by `timeout_s` seconds, less those in which it stands still. Use as `async with`.

    Raises:
        DeadlineError: the deadline passed.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        """`name` is what is waited for, for messages."""
        self._name = name
        self._timeout_s = timeout_s
        self._left_s = timeout_s
        self._since_s = 0.0
        self._num_stopped = 0
        self._scope = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> Self:
        self._since_s = time.monotonic()
        await self._scope.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        try:
            await self._scope.__aexit__(kind, exc, traceback)  # type: ignore[arg-type]
        except TimeoutError as late:
            raise DeadlineError(f"waiting for {self._name} passed its deadline of {self._timeout_s:g} s") from late

    async def stand_still(self, waiting: Awaitable[T]) -> T:
        """What `waiting` gives; its time does not count."""
        self._num_stopped += 1
        if self._num_stopped == 1:
            self._left_s -= time.monotonic() - self._since_s
            self._set(None)
        try:
            return await waiting
        finally:
            self._num_stopped -= 1
            if not self._num_stopped:
                self._since_s = time.monotonic()
                self._set(asyncio.get_running_loop().time() + self._left_s)

    def _set(self, when: float | None) -> None:
        if not self._scope.expired():
            self._scope.reschedule(when)
