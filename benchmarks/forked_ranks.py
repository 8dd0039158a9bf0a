"""Ranks forked from a benchmark, which meet over gloo: each begins with what the benchmark has imported."""

import math
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from offbeat.config.dist import DistConfig
from offbeat.process.serving import die_with_parent
from offbeat.sync.links import MeetingPlace
from offbeat.sync.mesh import MeshShape, ProcessGroups, connect_store, host_store, join, leave

TIMEOUT_S = 300
T = TypeVar("T")


def run_ranks(act: Callable[[ProcessGroups], T], *, shape: MeshShape) -> list[T]:
    """Call `act` on every rank of a mesh, once all have met; returns what it gave, by rank."""
    context = multiprocessing.get_context("fork")
    world = math.prod(shape.sizes.values())
    ends = [context.Pipe() for _ in range(world)]
    processes = [context.Process(target=_be_rank, args=(rank, world, shape, act, theirs)) for rank, (_, theirs) in enumerate(ends)]
    for process in processes:
        process.start()
    for _, theirs in ends:
        theirs.close()  # so that the death of the ranks is seen
    store = host_store(TIMEOUT_S)  # after the forks, which take no thread along
    for ours, _ in ends:
        ours.send(store.port)
    answers = [ours.recv() for ours, _ in ends]
    for process in processes:
        process.join()
    return answers


def _be_rank(rank: int, world: int, shape: MeshShape, act: Callable[[ProcessGroups], object], parent: Connection) -> None:
    die_with_parent(os.getppid())
    store = connect_store("127.0.0.1", parent.recv(), timeout_s=TIMEOUT_S)
    config = DistConfig(init_timeout_s=TIMEOUT_S, sync_timeout_s=TIMEOUT_S)
    parent.send(act(join(rank=rank, world=world, place=MeetingPlace(store), config=config, shape=shape)))
    leave()
