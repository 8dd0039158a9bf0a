"""The store behind sync points and the collectives of SPMD ranks, in memory: R ranks run as threads of one process.

The store is rank 0's, as without torchrun's own: it answers nothing while rank 0 is stopped, and is gone once rank 0 has ended.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.sync.peers import Card, ProcessState
from worlds.virtual_threads import own_rank, threads

_HOST = 0


@dataclass
class Memory:
    """What ranks share.

    Attributes:
        values: of the store, by key.
        queues: of the store, by key.
        collectives: what each rank has given, by the number of the collective.
        ended: ranks whose process has ended by itself, and how.
    """

    world: int
    values: dict[str, bytes] = field(default_factory=dict)
    queues: dict[str, deque[bytes]] = field(default_factory=dict)
    collectives: dict[int, dict[int, Any]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)

    def ending(self, rank: int) -> str:
        """Return how a rank's process has ended; "" while it lives."""
        return threads().dead.get(rank, "") or self.ended.get(rank, "")


class StandInStore:
    """A client of the store. See `torch.distributed.TCPStore`."""

    host = "sim"
    port = 1

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: deadlines are kept by the ranks' threads."""

    def set(self, key: str, value: str) -> None:
        self._reach()
        self._memory.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._reach()
        self._wait(lambda: key in self._memory.values)
        return self._memory.values[key]

    def check(self, keys: Sequence[str]) -> bool:
        self._reach()
        return all(key in self._memory.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._reach()
        total = int(self._memory.values.get(key, b"0")) + amount
        self._memory.values[key] = b"%d" % total
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._reach()
        values = self._memory.values
        if values.get(key, b"") == expected.encode():
            values[key] = desired.encode()
        return values.get(key, expected.encode())

    def delete_key(self, key: str) -> bool:
        self._reach()
        return self._memory.values.pop(key, None) is not None

    def queue_push(self, key: str, value: str) -> None:
        self._reach()
        self._memory.queues.setdefault(key, deque()).append(value.encode())

    def queue_pop(self, key: str) -> bytes:
        self._reach()
        queues = self._memory.queues
        self._wait(lambda: bool(queues.get(key)))
        return queues[key].popleft()

    def queue_len(self, key: str) -> int:
        self._reach()
        return len(self._memory.queues.get(key, ()))

    def _reach(self) -> None:
        """Take the time of a call."""
        threads().sleep(threads().blocking_s() / 10)
        self._wait(lambda: True)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait for the host's answer.

        Raises:
            DistNetworkError: the host is gone.
        """
        memory = self._memory
        threads().wait(lambda: bool(memory.ending(_HOST)) or (until() and (own_rank() == _HOST or not threads().is_stopped(_HOST))))
        if memory.ending(_HOST):
            raise dist.DistNetworkError("the store's host is gone")


class StandInHostedStore(StandInStore):
    """Rank 0's own."""


class StandInGroup:
    """A gloo group of all ranks. Each collective is matched by its number."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self.memory = memory
        self._rank = rank
        self._num_joined = 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.memory.world

    def join(self, given: Any, take: Callable[[dict[int, Any]], None]) -> "_Work":
        """Give this rank's part; `take` gets those of all ranks by rank."""
        self._num_joined += 1
        parts = self.memory.collectives.setdefault(self._num_joined, {})
        parts[self._rank] = given
        self.memory.collectives.pop(self._num_joined - 100, None)
        return _Work(parts, self.memory.world, take)


class _Work:
    """See `torch.distributed.Work`."""

    def __init__(self, parts: dict[int, Any], world: int, take: Callable[[dict[int, Any]], None]) -> None:
        self._parts, self._world, self._take = parts, world, take

    def is_completed(self) -> bool:
        return len(self._parts) == self._world

    def wait(self, timeout: timedelta | None = None) -> None:
        if not threads().wait(self.is_completed, None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("gloo: Operation timed out")
        self._take(self._parts)


def _nothing(_parts: dict[int, Any]) -> None:
    pass


class StandInDist:
    """Stands in for `torch.distributed` in the modules of sync points."""

    DistError = dist.DistError
    ReduceOp = dist.ReduceOp
    ProcessGroup = StandInGroup
    Work = dist.Work

    class group:  # noqa: N801
        """See `torch.distributed.group`."""

        WORLD = None

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def init_process_group(self, *_args: Any, **_named: Any) -> None:
        """Do nothing."""

    def PrefixStore(self, *_args: Any) -> None:  # noqa: N802
        """Return nothing."""

    def new_group(self, **_named: Any) -> StandInGroup:
        return StandInGroup(self._memory, own_rank())

    def is_initialized(self) -> bool:
        return False

    def barrier(self, *, group: StandInGroup, async_op: bool) -> _Work:
        del async_op
        return group.join(None, _nothing)

    def all_reduce(self, values: Tensor, *, op: Any, group: StandInGroup, async_op: bool) -> _Work:
        del async_op

        def take(parts: dict[int, Tensor]) -> None:
            all_ranks = torch.stack([parts[rank] for rank in sorted(parts)])
            values.copy_(all_ranks.sum(0) if op == dist.ReduceOp.SUM else all_ranks.max(0).values)

        return group.join(values.clone(), take)

    def all_gather(self, out: list[Tensor], value: Tensor, *, group: StandInGroup, async_op: bool) -> _Work:
        del async_op

        def take(parts: dict[int, Tensor]) -> None:
            for rank, part in parts.items():
                out[rank].copy_(part)

        return group.join(value.clone(), take)

    def broadcast(self, value: Tensor, source: int, *, group: StandInGroup, async_op: bool) -> _Work:
        del async_op

        def take(parts: dict[int, Tensor]) -> None:
            value.copy_(parts[source])

        return group.join(value.clone(), take)

    def all_to_all_single(
        self, out: Tensor, given: Tensor, *, output_split_sizes: list[int], input_split_sizes: list[int], group: StandInGroup,
        async_op: bool,
    ) -> _Work:
        del async_op, output_split_sizes
        own = group.rank()

        def take(parts: dict[int, list[Tensor]]) -> None:
            out.copy_(torch.cat([parts[rank][own] for rank in sorted(parts)]))

        return group.join([part.clone() for part in given.split(input_split_sizes)], take)


class StandInDeaths:
    """Stands in for `offbeat.sync.peers.Deaths`."""

    memory: Memory

    def __init__(self) -> None:
        self._watched: set[int] = set()
        self._woken = False

    def add(self, cards: Sequence[Card]) -> None:
        self._watched |= {card.rank for card in cards}

    def wait(self, timeout_s: float | None = None) -> list[int]:
        threads().wait(lambda: self._woken or bool(self._died()), timeout_s)
        died = self._died()
        self._woken = False
        self._watched -= set(died)
        return died

    def wake(self) -> None:
        self._woken = True

    def close(self) -> None:
        """Do nothing."""

    def _died(self) -> list[int]:
        return sorted(rank for rank in self._watched if self.memory.ending(rank))


def own_card(rank: int, *, hosts_store: bool, apart: bool) -> Card:
    """See `offbeat.sync.peers.own_card`; `apart`: whether each rank is on a machine of its own."""
    host = f"sim-{rank}" if apart else "sim"
    return Card(rank=rank, host=host, pid=1000 + rank, started=1, machine=host, hosts_store=hosts_store)


def observe(card: Card) -> ProcessState:
    """See `offbeat.sync.peers.observe`."""
    if how := StandInDeaths.memory.ending(card.rank):
        return ProcessState(card.rank, "dead", how)
    if threads().is_stopped(card.rank):
        return ProcessState(card.rank, "stopped", "is stopped by a signal (SIGSTOP or a debugger)")
    return ProcessState(card.rank, "alive", "is sleeping, after 1.0 s of CPU time")


def end_if_stopped(card: Card) -> None:
    """See `offbeat.sync.peers.end_if_stopped`."""
    if threads().is_stopped(card.rank):
        threads().dead.setdefault(card.rank, "was killed by SIGKILL")
