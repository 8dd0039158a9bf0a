"""Unguessable links that expire: clients fetch files by them without a key. Used by `routes_rest` and `archive`."""

import secrets
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

Ends = Callable[[T], bool]
"""Whether the links to a target end."""

LINK_S = 3600.0
MAX_LINKS = 10_000


class Links(Generic[T]):
    """Targets by token, each for an hour; of more than `MAX_LINKS`, the oldest end early."""

    def __init__(self) -> None:
        self._links: dict[str, tuple[T, float]] = {}  # oldest first
        self._token_of: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._links)

    def add(self, target: T) -> tuple[str, float]:
        """Return a token for a target, and its expiry in seconds since the epoch; reuse one that lasts long enough."""
        now = time.time()
        while self._links and (len(self._links) >= MAX_LINKS or next(iter(self._links.values()))[1] <= now):
            self._drop(next(iter(self._links)))
        if (known := self._token_of.get(target)) is not None and (expires := self._links[known][1]) > now + LINK_S / 2:
            return known, expires
        token, expires = secrets.token_urlsafe(24), now + LINK_S
        self._links[token], self._token_of[target] = (target, expires), token
        return token, expires

    def find(self, token: str) -> T | None:
        """Return the target of a token, or None if the link does not exist or has expired."""
        target, expires = self._links.get(token, (None, 0.0))
        return target if expires > time.time() else None

    def end_links(self, ends: Ends[T]) -> None:
        """End all links to some targets."""
        for token in [token for token, (target, _) in self._links.items() if ends(target)]:
            self._drop(token)

    def _drop(self, token: str) -> None:
        target, _ = self._links.pop(token)
        if self._token_of.get(target) == token:
            del self._token_of[target]
