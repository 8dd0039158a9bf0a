"""Decides the trainers' next turn, by joining the queued work of many models. `training` carries the decisions out.

Each model's jobs run in the order in which they were added. There are four lanes: steps, passes that learn, passes that only score, and
jobs that need the trainers to themselves. Every job has a size in tokens, as weighed by `cost`, and each owner's share is counted over
all lanes. Lanes with work take turns, except those in which every waiting owner is ahead of some other owner by more than a turn. The
steps of all models that are due are one call. A pass takes jobs of as many owners as fit into its budget, and so does a turn of exclusive
jobs. The owner with the lowest share comes first, and a job larger than the budget is split. A new owner starts at the lowest current
share, so idle time earns no credit.
"""

import heapq
import math
import sys
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class Lane(Enum):
    """Kinds of work that cannot share a turn."""

    STEP = "step"
    LEARN = "learn"
    SCORE = "score"
    ALONE = "alone"


_PASSES = (Lane.LEARN, Lane.SCORE)


class Job(Generic[T]):
    """Work of one model; `sizes` are [N] int64, of each sequence of a pass, or one entry; `done` are the sequences given out."""

    def __init__(self, model: str, owner: str, lane: Lane, item: T, *, sizes: np.ndarray | None = None) -> None:
        self.model = model
        self.owner = owner
        self.lane = lane
        self.item = item
        self.sizes = np.ones(1, np.int64) if sizes is None else sizes
        self.done = 0
        self._ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes, dtype=np.int64)])

    @property
    def left(self) -> int:
        """Size of the sequences not yet given out."""
        return int(self._ends[-1] - self._ends[self.done])

    def take(self, budget: float) -> "JobPart[T]":
        """Take as many of the next sequences as fit into the budget, at least one."""
        start, num = self.done, len(self.sizes)
        fits = num if self.left <= budget else int(np.searchsorted(self._ends, self._ends[start] + budget, side="right")) - 1
        self.done = min(max(fits, start + 1), num)
        return JobPart(self, start, self.done, int(self._ends[self.done] - self._ends[start]))


@dataclass(frozen=True, eq=False)
class JobPart(Generic[T]):
    """Sequences start to end (exclusive) of a job, and their total size; e.g. 2 to 5 are three sequences."""

    job: Job[T]
    start: int
    end: int
    size: int

    @property
    def is_last(self) -> bool:
        return self.end == len(self.job.sizes)


@dataclass(frozen=True, eq=False)
class Turn(Generic[T]):
    """Work of the trainers at one time; parts of one model are in the order of its jobs."""

    lane: Lane
    parts: tuple[JobPart[T], ...]


class Schedule(Generic[T]):
    """Queues of jobs by model, and the owners' shares. Each turn must be done before the next is requested."""

    def __init__(self, *, max_tokens: int, max_models: int = sys.maxsize) -> None:
        """`max_tokens` is the budget of a turn, which a single sequence may exceed and steps do not fill; `max_models` bounds it too."""
        self._max_tokens = max_tokens
        self._max_models = max_models
        self._queues: dict[str, deque[Job[T]]] = {}  # only models with jobs; the models served last are at the end
        self._lanes = deque(Lane)
        self._shares = _Shares()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Job[T]]:
        """Iterate over the jobs that are not completely given out; a model's jobs are in order."""
        return (job for queue in self._queues.values() for job in queue)

    def add(self, job: Job[T]) -> None:
        self._queues.setdefault(job.model, deque()).append(job)

    def drop(self, job: Job[T]) -> None:
        """Remove the rest of a job from the queue."""
        queue = self._queues.get(job.model, deque())
        if job in queue:
            queue.remove(job)
            if not queue:
                del self._queues[job.model]

    def next(self) -> Turn[T] | None:
        """Return the next turn, or None if nothing waits."""
        heads = [queue[0] for queue in self._queues.values()]
        if not heads:
            return None
        self._shares.set_waiting({job.owner for job in heads})
        enough = self._shares.level + self._max_tokens
        waiting = {job.lane for job in heads if self._shares.had[job.owner] <= enough}
        lane = next(lane for lane in self._lanes if lane in waiting)  # includes the lane of the owner with the lowest share
        self._lanes.remove(lane)
        self._lanes.append(lane)
        return Turn(lane, tuple(self._give(lane)))

    def _give(self, lane: Lane) -> Iterator[JobPart[T]]:
        """Give out the parts of one turn, each time from the owner with the lowest share, as long as the next job fits."""
        models: dict[str, deque[str]] = {}
        for model, queue in self._queues.items():
            if queue[0].lane is lane:
                models.setdefault(queue[0].owner, deque()).append(model)
        had, left, is_first = self._shares.had, math.inf if lane is Lane.STEP else self._max_tokens, True
        ranking = [(had[owner], place, owner) for place, owner in enumerate(models)]
        heapq.heapify(ranking)
        chosen: set[str] = set()
        while ranking:
            _, place, owner = heapq.heappop(ranking)
            model = models[owner].popleft()
            job = self._queues[model][0]
            if job.left > left and not is_first:
                continue  # drops the owner out of this turn; it will be first in the next
            chosen.add(model)
            if len(chosen) > self._max_models:
                return
            part = job.take(left)
            yield part
            is_first, left = False, left - part.size
            had[owner] += max(part.size, 1)
            if self._move_on(model, part) and lane in _PASSES:
                models[owner].append(model)
            if models[owner]:
                heapq.heappush(ranking, (had[owner], place, owner))

    def _move_on(self, model: str, part: JobPart[T]) -> bool:
        """Move a model behind the others. Returns whether its next job may follow in the same turn."""
        queue = self._queues.pop(model)
        if part.is_last:
            queue.popleft()
        if queue:
            self._queues[model] = queue
        return bool(queue) and part.is_last and queue[0].lane is part.job.lane


class _Shares:
    """Tokens served to each owner: start-time fair queueing (Goyal, Vin and Cheng 1996).

    Attributes:
        had: tokens, for owners that wait or are ahead of waiting ones.
        level: lowest share of an owner that waits.
    """

    def __init__(self) -> None:
        self.had: dict[str, int] = {}
        self.level = 0

    def set_waiting(self, owners: Collection[str]) -> None:
        """Set the owners that wait now. A new one starts at the lowest current share, so idle time earns no credit."""
        waiting = {owner: max(self.had.get(owner, 0), self.level) for owner in owners}
        self.level = min(waiting.values())
        self.had = {owner: had for owner, had in self.had.items() if had > self.level} | waiting
