"""Decides which requests run; pure bookkeeping without tensors, driven by `engine.Engine` alone.

Running samples occupy the dense slots 0..B-1, so that a decode step reads a prefix of the cache without gathering. A finished slot is
filled by the last running one (`compact`). Requests are admitted first in, first out, all n samples of one together, and only when the
cache can hold everything that runs at its longest possible length: a sample that has started is never preempted for lack of memory.

A prompt that is too long for one round is computed in parts, so that running samples decode in between. Its request waits meanwhile at the
head of the queue, and the keys and values of its parts are in the slot after the running ones.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

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


class KnownPrompts(Protocol):
    """Tells which beginnings of prompts need not be computed."""

    def num_known(self, request: Request) -> int:
        """Return the number of tokens at the beginning of the request's prompt that were computed before; less than all of them."""
        ...

    def end_of_part(self, request: Request, stop: int) -> int:
        """Return where a part of the prompt that would end before token `stop` ends: there, or behind the image that it would cut."""
        ...


@dataclass(frozen=True)
class PromptPart:
    """A part of a prompt that is computed in several rounds.

    Attributes:
        known: number of tokens at the prompt's beginning that were computed for earlier prompts.
        start, stop: the tokens of the part, such as 512 to 1024 of 2000.
    """

    request: Request
    known: int
    start: int
    stop: int


@dataclass(frozen=True)
class RoundPrompts:
    """Prompts to compute in one round.

    Attributes:
        requests: requests that start; their samples occupy the slots from the old `running` on, in order.
        begun: the newest part of the first request's prompt, if parts of it were computed in earlier rounds.
        part: a part to compute of a prompt whose request does not start yet.
        likely: slots and positions that all samples may take soon, those of waiting requests included.
    """

    requests: list[Request] = field(default_factory=list)
    begun: PromptPart | None = None
    part: PromptPart | None = None
    likely: tuple[int, int] = (0, 0)


class Scheduler:
    """Waiting requests and the number of busy slots.

    Promises: at most `max_running` slots are busy; the number of busy slots times the longest possible length among them is at most
    `max_cache_tokens`; at most `max_queued` requests wait; requests start in the order in which they came; a round computes at most
    `max_prefill_tokens` prompt tokens, and at most `max_prefill_per_round` while samples run, without those that are known and those that
    complete an image (`KnownPrompts.end_of_part`). A request that fits alone starts at the latest after all others.

    `begun` is the newest part of the first waiting request's prompt; None if no part of it is computed.
    """

    def __init__(
        self, *, max_running: int, max_queued: int, max_prefill_tokens: int, max_prefill_per_round: int | None = None,
        max_cache_tokens: int | None = None,
    ) -> None:
        """Without `max_cache_tokens` only the number of slots bounds the running samples."""
        self.max_running = max_running
        self.max_queued = max_queued
        self.max_prefill_tokens = max_prefill_tokens
        self.max_prefill_per_round = min(max_prefill_per_round or max_prefill_tokens, max_prefill_tokens)
        self.begun: PromptPart | None = None
        self._max_cache_tokens = max_cache_tokens
        self._needs: list[int] = []  # largest length in positions that each busy slot may reach
        self._waiting: deque[Request] = deque()

    @property
    def running(self) -> int:
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
        """Raise RefusedError if the cache could not hold the request's samples even if nothing else ran."""
        need = _need(request)
        if request.n > self._most_slots(need):
            raise RefusedError(
                f"{request.n} samples of up to {need} tokens take {request.n * need} places in the cache, which has "
                f"{self._max_cache_tokens}; lower n, max_tokens or the prompt, or raise the engine's max_cache_bytes")

    def waiting(self) -> Iterator[Request]:
        return iter(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises BusyError if `max_queued` requests are already waiting."""
        if self.num_waiting >= self.max_queued:
            raise BusyError(f"the engine's queue is full: {self.num_waiting} requests wait, as many as max_queued allows; try again later")
        self._waiting.append(request)

    def remove_request(self, request_id: str) -> bool:
        """Drop a waiting request; False if there is no such request."""
        kept = deque(request for request in self._waiting if request.id != request_id)
        removed = len(kept) < len(self._waiting)
        self._waiting = kept
        if self.begun is not None and self.begun.request.id == request_id:
            self.begun = None
        return removed

    def drop_waiting(self) -> list[Request]:
        """Empty the queue and return its requests."""
        dropped, self._waiting, self.begun = list(self._waiting), deque(), None
        return dropped

    def admit(self, prompts: KnownPrompts) -> RoundPrompts:
        """Take the requests that start now, or a part of the first prompt if it is too long for one round."""
        begun = self.begun
        admitted: list[Request] = []
        if begun is None and self.num_free < self.running // REFILL_FRACTION:
            return RoundPrompts()
        room = self.max_prefill_per_round if self.running else self.max_prefill_tokens
        while self._waiting:
            request = self._waiting[0]
            need = _need(request)
            if self.running + request.n > self._most_slots(max([need, *self._needs])):
                break
            known = prompts.num_known(request) if self.begun is None else self.begun.known
            start = known if self.begun is None else self.begun.stop
            if start + room < len(request.prompt) and (stop := prompts.end_of_part(request, start + room)) < len(request.prompt):
                if not admitted:
                    self.begun = PromptPart(request, known, start, stop)
                    return RoundPrompts(part=self.begun)
                break
            room -= len(request.prompt) - start
            self.begun = None
            admitted.append(self._waiting.popleft())
            self._needs += [need] * request.n
        return RoundPrompts(admitted, begun, likely=self._likely() if admitted else (0, 0))

    def _likely(self) -> tuple[int, int]:
        """Return the slots and positions of all running samples and of those that wait, if none of them ends before its longest length."""
        longest = max([*self._needs, *map(_need, self._waiting)], default=BUCKET)
        return min(self.running + sum(request.n for request in self._waiting), self._most_slots(longest)), longest

    def compact(self, finished: Iterable[int]) -> tuple[list[int], list[int]]:
        """Free slots and keep the rest dense; returns sources and targets, of which no slot is in both.

        The sample in slot `sources[i]` moves to `targets[i]`, such as ([3], [1]) if slot 1 of 0..3 ends.
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
    """Split prompts of `lengths` [P] into batches that are padded to a common length; returns indices [n] int64 of each.

    A batch has at most `MOST_PADDING` tokens of padding, and at most `max_tokens` tokens in all, unless it is a single prompt.
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
