"""Several ranks' `Sync` in one process, a thread each; for what needs no process of its own. Used by the tests of dist."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from offbeat.config.dist import DistConfig
from offbeat.sync.links import MeetingPlace
from offbeat.sync.mesh import host_store
from offbeat.sync.sync import Sync


@contextmanager
def meeting(world, **config):
    """The ranks' ends, by rank, and the store. Ranks that live answer, however busy the machine is."""
    store = host_store(60)
    settings = DistConfig(**{"answer_timeout_s": 20} | config)
    syncs = [Sync.start(rank=rank, world=world, place=MeetingPlace(store), config=settings, hosts_store=False) for rank in range(world)]
    try:
        yield syncs, store
    finally:
        for sync in syncs:
            sync.close()


def together(syncs, act):
    """`act(sync)` of each in a thread of its own; what each returned or raised."""
    with ThreadPoolExecutor(len(syncs)) as pool:
        futures = [pool.submit(act, sync) for sync in syncs]
        return [future.exception() or future.result() for future in futures]
