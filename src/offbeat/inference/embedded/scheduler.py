"""Decides which requests run; pure bookkeeping without tensors, driven by `engine.Engine` alone.

Running samples occupy the dense slots 0..B-1, so that a decode step reads a prefix of the cache without gathering. A finished slot is
filled by the last running one (`compact`). Requests are admitted first in, first out, all n samples of one together.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from offbeat.errors import BusyError
from offbeat.inference.embedded.request import Request

REFILL_FRACTION = 16
"""With more than 15/16 of the slots busy, freed slots are gathered before a prefill, which costs the same for one prompt as for several."""


class Scheduler:
    """Waiting requests and the number of busy slots.

    Promises: at most `max_running` slots are busy; at most `max_queued` requests wait; requests start in the order in which they came; one
    admission computes at most `max_prefill_tokens` prompt tokens, unless a single prompt is longer.
    """

    def __init__(self, *, max_running: int, max_queued: int, max_prefill_tokens: int) -> None:
        self.max_running = max_running
        self.max_queued = max_queued
        self.max_prefill_tokens = max_prefill_tokens
        self.running = 0
        self._waiting: deque[Request] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free(self) -> int:
        return self.max_running - self.running

    def waiting(self) -> Iterator[Request]:
        """Requests that have not started, in order."""
        return iter(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BusyError: `max_queued` requests wait already.
        """
        if self.num_waiting >= self.max_queued:
            raise BusyError(f"the engine's queue is full: {self.num_waiting} requests wait, as many as max_queued allows; try again later")
        self._waiting.append(request)

    def remove(self, request_id: str) -> bool:
        """Forget a waiting request; False if it does not wait here."""
        kept = deque(request for request in self._waiting if request.id != request_id)
        removed = len(kept) < len(self._waiting)
        self._waiting = kept
        return removed

    def drop_waiting(self) -> list[Request]:
        """Empty the queue and return what was in it."""
        dropped, self._waiting = list(self._waiting), deque()
        return dropped

    def admit(self) -> list[Request]:
        """Take the requests that start now; their samples occupy the slots from the old `running` on, in order."""
        admitted: list[Request] = []
        tokens = 0
        if self.num_free < self.running // REFILL_FRACTION:
            return admitted
        while self._waiting:
            request = self._waiting[0]
            tokens += len(request.prompt)
            if request.n > self.num_free or (admitted and tokens > self.max_prefill_tokens):
                break
            admitted.append(self._waiting.popleft())
            self.running += request.n
        return admitted

    def compact(self, finished: Iterable[int]) -> tuple[list[int], list[int]]:
        """Free slots and keep the rest dense.

        Returns:
            (sources, targets): the sample in slot `sources[i]` moves to `targets[i]`; no slot is in both lists.
        """
        holes = sorted(set(finished))
        assert not holes or holes[-1] < self.running, "only a running slot can finish"
        dead = set(holes)
        self.running -= len(holes)
        targets = [hole for hole in holes if hole < self.running]
        sources = [slot for slot in range(self.running, self.running + len(holes)) if slot not in dead]
        return sources, targets


def plan_prefill(lengths: np.ndarray, *, max_tokens: int) -> list[np.ndarray]:
    """Split prompts into batches padded to a common length.

    Args:
        lengths: [P] tokens per prompt.
        max_tokens: most tokens in one batch, padding included, unless it is a single prompt.

    Returns:
        Indices of the prompts of each batch. Lengths in a batch differ by at most a factor of two, so less than half of it is padding.
    """
    order = np.argsort(-lengths, kind="stable")
    batches: list[list[int]] = []
    for i in order.tolist():
        longest = lengths[batches[-1][0]] if batches else 0
        if not batches or 2 * lengths[i] < longest or longest * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(i)
    return [np.array(batch) for batch in batches]
