"""Avoids pauses of a process that serves many peers from one event loop: by garbage collection, by returned pages, and by freeing.

Torch-free. `workers.worker.library_environment` has the variables that a worker sets before its numeric libraries load.
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
_KEPT = {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: 1 << 30, _ARENA_MAX: 1}  # arenas of threads give back large blocks all the same
_LARGEST_BEFORE_2_35 = 32 << 20
"""Largest _MMAP_THRESHOLD of older versions of glibc, in bytes."""
_AFTERWARDS = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _ARENA_MAX: 0}
"""Values that glibc adapts to by itself in a process with large arrays; once one is set, it adapts no more."""


@contextmanager
def steady_memory() -> Iterator[None]:
    """Both `few_collections` and `kept_pages`, for the controller of a run."""
    with few_collections(), kept_pages():
        yield


@contextmanager
def few_collections() -> Iterator[None]:
    """Let Python look for garbage in small portions during the body, since a full collection holds up all threads, for 50 ms or more.

    Objects from before are exempt meanwhile, unless `loading` has exempted the libraries: then few others are left, and exempting these,
    too, could not be undone without the libraries. Collections may be rare, since objects without references are freed at once.
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
    """Have glibc keep the pages that are freed during the body for later arrays, up to the process's own peak.

    The arrays of a step come and go. By default each large one is mapped anew, so that a fifth of the controller's CPU time goes into
    pages that the kernel clears, and unmapping those of a large step holds up the event loop for 10 ms. Without glibc nothing changes.
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

    Freeing the groups of a large step at once would hold it up: 2 us for each trajectory, e.g. 15 ms for 8,000 of them. Freeing them on a
    thread does so, too, since it holds the interpreter's lock. So the list must be its items' last holder, and nobody else's.
    """
    while items:
        del items[-_LET_GO_AT_ONCE:]
        await asyncio.sleep(0)
