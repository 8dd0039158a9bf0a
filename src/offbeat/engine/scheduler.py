"""Decides which requests run; pure bookkeeping without tensors, driven by `engine.Engine` alone.

Running samples occupy the dense slots 0..B-1, so that a decode step reads a prefix of the cache without gathering. A finished slot is
filled by the last running one (`compact`). Requests are admitted first in, first out, all n samples of one together, and only when the
cache can hold everything that runs at its longest possible length: a sample that has started is never preempted for lack of memory.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from offbeat.engine.cache import BUCKET, round_up
from offbeat.engine.request import Request
from offbeat.errors import BusyError, RefusedError

REFILL_FRACTION = 16
"""With more than 15/16 of the slots busy, freed slots are collected before a prefill, which costs as much for one prompt as for
several.
"""

MOST_PADDING = 32
"""Most padding tokens in a batch of prompts: computing more takes longer than starting another batch, on tiny models and on large ones."""


class Scheduler:
    """Waiting requests and the number of busy slots.

    Promises: at most `max_running` slots are busy; the number of busy slots times the longest possible length among them is at most
    `max_cache_tokens`; at most `max_queued` requests wait; requests start in the order in which they came; one admission computes at most
    `max_prefill_tokens` prompt tokens, unless a single prompt is longer. A request that fits alone starts at the latest after all others.
    """

    def __init__(self, *, max_running: int, max_queued: int, max_prefill_tokens: int, max_cache_tokens: int | None = None) -> None:
        """Without `max_cache_tokens` only the number of slots bounds the running samples."""
        self.max_running = max_running
        self.max_queued = max_queued
        self.max_prefill_tokens = max_prefill_tokens
        self._max_cache_tokens = max_cache_tokens
        self._needs: list[int] = []  # largest length in positions that each busy slot may reach
        self._waiting: deque[Request] = deque()

    @property
    def running(self) -> int:
        """Number of busy slots."""
        return len(self._needs)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free(self) -> int:
        """Number of slots for further samples that become no longer than the running ones."""
        return self._most_slots(max(self._needs, default=BUCKET)) - self.running

    def _most_slots(self, positions: int) -> int:
        """Number of slots that may be busy if the longest sample takes this many positions."""
        return self.max_running if self._max_cache_tokens is None else min(self.max_running, self._max_cache_tokens // positions)

    def check(self, request: Request) -> None:
        """Check that the request can ever be admitted.

        Raises:
            RefusedError: the cache could not hold the request's samples even if nothing else ran.
        """
        need = _need(request)
        if request.n > self._most_slots(need):
            raise RefusedError(
                f"{request.n} samples of up to {need} tokens take {request.n * need} places in the cache, which has "
                f"{self._max_cache_tokens}; lower n, max_tokens or the prompt, or raise the engine's max_cache_bytes")

    def waiting(self) -> Iterator[Request]:
        """Requests that have not started, in order."""
        return iter(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BusyError: `max_queued` requests are already waiting.
        """
        if self.num_waiting >= self.max_queued:
            raise BusyError(f"the engine's queue is full: {self.num_waiting} requests wait, as many as max_queued allows; try again later")
        self._waiting.append(request)

    def remove(self, request_id: str) -> bool:
        """Drop a waiting request; False if there is no such request."""
        kept = deque(request for request in self._waiting if request.id != request_id)
        removed = len(kept) < len(self._waiting)
        self._waiting = kept
        return removed

    def drop_waiting(self) -> list[Request]:
        """Empty the queue and return its requests."""
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
            need = _need(request)
            fits = self.running + request.n <= self._most_slots(max([need, *self._needs]))
            if not fits or (admitted and tokens > self.max_prefill_tokens):
                break
            admitted.append(self._waiting.popleft())
            self._needs += [need] * request.n
        return admitted

    def compact(self, finished: Iterable[int]) -> tuple[list[int], list[int]]:
        """Free slots and keep the rest dense.

        Returns:
            (sources, targets): the sample in slot `sources[i]` moves to `targets[i]`, such as ([3], [1]) if slot 1 of 0..3 ends.
            No slot is in both lists.
        """
        holes = sorted(set(finished))
        assert not holes or holes[-1] < self.running, "only a running slot can finish"
        dead = set(holes)
        left = self.running - len(holes)
        targets = [hole for hole in holes if hole < left]
        sources = [slot for slot in range(left, self.running) if slot not in dead]
        for source, target in zip(sources, targets, strict=True):
            self._needs[target] = self._needs[source]
        del self._needs[left:]
        return sources, targets


def _need(request: Request) -> int:
    """Number of cache positions that each of a request's samples may reach."""
    return round_up(len(request.prompt) + request.params.max_new_tokens, BUCKET)


def plan_prefill(lengths: np.ndarray, *, max_tokens: int) -> list[np.ndarray]:
    """Split prompts into batches padded to a common length.

    Args:
        lengths: [P] integer, tokens per prompt.
        max_tokens: most tokens in one batch, padding included, unless it is a single prompt.

    Returns:
        Indices of each batch's prompts, [n] int64 each; a batch holds at most `MOST_PADDING` tokens of padding.
    """
    order = np.argsort(-lengths, kind="stable")
    batches: list[list[int]] = []
    longest = padding = 0
    for i in order.tolist():
        padding += longest - lengths[i]
        if not batches or padding > MOST_PADDING or longest * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
            longest, padding = lengths[i], 0
        batches[-1].append(i)
    return [np.array(batch) for batch in batches]
