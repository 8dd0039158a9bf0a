"""How a process that serves many peers from one event loop keeps memory from holding it up: garbage, freed pages, and freeing itself.

Torch-free. What a worker process sets before its numeric libraries load is in `workers.worker.library_environment`.
"""

import asyncio
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_COLLECTED_AT = 700, 2, 10_000  # thresholds of the generations: about 2,000 young objects at once, and all of them hardly ever

_LET_GO_AT_ONCE = 16

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of mallopt(3)
_KEPT = {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: 1 << 30, _ARENA_MAX: 1}  # arenas of threads give back what is large all the same
_LARGEST_BEFORE_2_35 = 32 << 20
"""What older versions of glibc take for _MMAP_THRESHOLD."""
_AFTERWARDS = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _ARENA_MAX: 0}
"""What glibc adapts to by itself in a process with large arrays; once told anything, it adapts no more."""


@contextmanager
def steady_memory() -> Iterator[None]:
    """Both `few_collections` and `kept_pages`, as the controller of a run wants them."""
    with few_collections(), kept_pages():
        yield


@contextmanager
def few_collections() -> Iterator[None]:
    """Let Python look for garbage in small portions during the body, since a full collection holds up all threads, for 50 ms or more.

    What is there at the beginning is not looked at meanwhile, unless `loading` has exempted the libraries: then the rest is little, and to
    exempt it, too, could not be taken back without them. Little garbage has to be looked for: what nobody refers to is freed at once.
    """
    before, exempted = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    if not exempted:
        gc.freeze()
    gc.set_threshold(*_COLLECTED_AT)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not exempted:
            gc.unfreeze()


@contextmanager
def kept_pages() -> Iterator[None]:
    """Have glibc keep the pages that are freed during the body for what comes next, up to the process's own peak.

    The arrays of a step come and go. By default each large one is mapped anew, so that a fifth of the controller's CPU time goes into
    pages that the kernel clears, and unmapping those of a large step holds up the event loop for 10 ms. Where the C library is not glibc,
    nothing changes.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    for parameter, value in _KEPT.items():
        libc.mallopt(parameter, value)
    if not libc.mallopt(_MMAP_THRESHOLD, _KEPT[_MMAP_THRESHOLD]):
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BEFORE_2_35)
    try:
        yield
    finally:
        for parameter, value in _AFTERWARDS.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)


async def let_go(items: list[Any]) -> None:
    """Empty a list in portions, between which the event loop goes on.

    To free the groups of a large step at once would hold it up: 2 us for each of their trajectories, which is 15 ms for 8,000 of them. The
    same happens to what others free on a thread, since that, too, holds the interpreter's lock. So the list must be its items' last
    holder, and nobody else's.
    """
    while items:
        del items[-_LET_GO_AT_ONCE:]
        await asyncio.sleep(0)
