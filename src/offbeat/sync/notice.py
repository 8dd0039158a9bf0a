"""A notice that one rank posts and others read whenever they like, without a sync point or any waiting. Any rank may use it.

It is kept in the ranks' store and accessed by a client and a thread of its own, since a call may block while the store's host is stopped.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from offbeat.aio import SideThread
from offbeat.errors import DeadlineError

T = TypeVar("T")

_TIMEOUT_S = 5.0
"""Timeout for a few bytes to or from the store."""


class Notice:
    """One text under one name; empty until it is posted. Close it together with the rank. Raises DeadlineError if the store is silent."""

    def __init__(self, client: dist.TCPStore, name: str) -> None:
        """`client` must not be used by anyone else."""
        self._client = client
        self._name = name
        self._thread = SideThread(f"notice {name}")

    async def put_up(self, text: str) -> None:
        """Replace the text; every read that begins after the return finds it."""
        await self._call(partial(self._put_up, text))

    async def read(self) -> str:
        """Return the latest text."""
        return await self._call(self._read_value)

    def close(self) -> None:
        """End the thread; a call that it is in is abandoned."""
        self._thread.close()

    def _put_up(self, text: str) -> None:
        self._client.set(self._name, text)
        self._client.check([self._name])  # `set` is sent without an answer; the store answers this only after it has taken the text.

    def _read_value(self) -> str:
        return self._client.get(self._name).decode() if self._client.check([self._name]) else ""

    async def _call(self, function: Callable[[], T]) -> T:
        try:
            return await self._thread.run(f"the store's notice {self._name!r}", function, timeout_s=_TIMEOUT_S)
        except dist.DistError as exc:
            raise DeadlineError(f"the store, which holds the notice {self._name!r}, is gone: {exc}") from exc
