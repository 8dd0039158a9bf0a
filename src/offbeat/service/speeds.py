"""Tokens per second of each model over the last seconds. Fed by the code that counts tokens, read by the status page; bounded in time."""

import time
from collections import Counter, deque
from collections.abc import Mapping

from offbeat.types import Clock

_WINDOW_S = 10


class Speeds:
    """Token counts by key and second; e.g. 500 tokens over the last ten seconds are 50 per second."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, Counter[str]]] = deque()

    def note(self, key: str, tokens: int) -> None:
        """Count tokens as of now."""
        now = self._forget()
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append((now, Counter()))
        self._seconds[-1][1][key] += tokens

    def per_s(self) -> Mapping[str, float]:
        """Return tokens per second over the last ten seconds, for each key that had any."""
        self._forget()
        total: Counter[str] = Counter()
        for _, counts in self._seconds:
            total.update(counts)
        return {key: round(tokens / _WINDOW_S, 1) for key, tokens in total.items()}

    def _forget(self) -> int:
        now = int(self._clock())
        while self._seconds and self._seconds[0][0] <= now - _WINDOW_S:
            self._seconds.popleft()
        return now
