"""What `memory` keeps from holding up a process."""

import asyncio
import gc
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from offbeat.memory import few_collections, let_go
from offbeat.workers.worker import huge_page_environment, library_environment

_FAULTS = """
import resource
import threading
import numpy as np
from offbeat.memory import kept_pages

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    def fill():
        for _ in range(8):
            [np.ones(1 << 20, np.int8) for _ in range(16)]
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    fill()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = faults()
with kept_pages():
    faults()
    kept = faults()
print(plain, kept)
"""


@pytest.fixture
def refreeze() -> Iterator[None]:
    """Leaves the collector as it was before a test that takes back what is exempted."""
    yield
    gc.freeze()


def test_garbage_is_looked_for_in_small_portions_for_a_while(refreeze: None) -> None:
    gc.unfreeze()
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), few_collections():
        assert gc.get_freeze_count() > 0 and gc.get_threshold()[2] > before[2]
        gc.collect(0)  # counts begin anew
        for _ in range(2 * gc.get_threshold()[0]):
            cycle: list = []
            cycle.append(cycle)
        assert gc.get_count()[0] < gc.get_threshold()[0] and gc.get_count()[1] > 0, "the young are still collected"
        raise ZeroDivisionError
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_what_has_been_exempted_before_stays_so() -> None:
    gc.freeze()
    exempted, threshold = gc.get_freeze_count(), gc.get_threshold()
    kept: list = []
    with few_collections():
        kept.append(kept)
        assert gc.get_freeze_count() == exempted and gc.get_threshold() != threshold
    assert gc.get_freeze_count() == exempted and gc.get_threshold() == threshold
    assert gc.is_tracked(kept) and any(each is kept for each in gc.get_objects()), "nothing new is exempted"


def test_a_list_is_let_go_in_portions_between_which_the_loop_goes_on() -> None:
    class Thing:
        num_freed = 0

        def __del__(self) -> None:
            Thing.num_freed += 1

    things, seen = [Thing() for _ in range(100)], [0]

    async def watch() -> None:
        while True:
            seen.append(Thing.num_freed)
            await asyncio.sleep(0)

    async def main() -> None:
        watching = asyncio.create_task(watch())
        await let_go(things)
        watching.cancel()

    asyncio.run(main())
    assert things == [] and seen[-1] == 100
    assert max(after - before for before, after in pairwise(seen)) <= 16


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_pages_that_are_freed_are_kept_for_what_comes_next_on_threads_too() -> None:
    """16 MiB are filled 16 times, half of them on another thread: 65,536 pages of 4 KiB by default."""
    plain_environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    said = subprocess.run([sys.executable, "-c", _FAULTS], env=plain_environment, check=True, capture_output=True, text=True).stdout
    plain, kept = map(int, said.split())
    assert kept < plain / 10


_THREADS = """
import threading

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) << 12

def work():
    with turn:
        bytearray(32 << 20)
    end.wait()

turn, end = threading.Lock(), threading.Barrier(9)
threads = [threading.Thread(target=work) for _ in range(8)]
before = resident()
for thread in threads:
    thread.start()
end.wait()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="arenas are glibc's")
def test_the_threads_of_a_worker_share_the_memory_that_they_have_freed() -> None:
    """8 threads fill 32 MiB one after the other: 256 MiB where each keeps its own."""
    said = subprocess.run(
        [sys.executable, "-c", _THREADS], env=os.environ | library_environment(1), check=True, capture_output=True, text=True).stdout
    assert int(said) < 128 << 20


_PAGES = """
block = bytearray(64 << 20)
print(any(line.startswith("VmFlags:") and " hg" in line for line in open("/proc/self/smaps")))
"""


def _asks_for_huge_pages(environment: dict[str, str]) -> bool:
    env = os.environ | library_environment(1) | environment
    return subprocess.run([sys.executable, "-c", _PAGES], env=env, check=True, capture_output=True, text=True).stdout == "True\n"


def test_what_the_user_has_glibc_do_stays_and_an_own_choice_of_pages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "GLIBC_TUNABLES"
    for given, expected in (
        (None, {name: "glibc.malloc.hugetlb=1"}), ("glibc.malloc.check=3", {name: "glibc.malloc.check=3:glibc.malloc.hugetlb=1"}),
        ("glibc.malloc.hugetlb=2", {}),
    ):
        monkeypatch.setenv(name, given) if given else monkeypatch.delenv(name, raising=False)
        assert huge_page_environment() == expected


@pytest.mark.skipif(
    not (modes := Path("/sys/kernel/mm/transparent_hugepage/enabled")).exists() or "[madvise]" not in modes.read_text(),
    reason="the system gives huge pages to all processes, or to none")
@pytest.mark.skipif(sys.platform != "linux" or "glibc" not in platform.libc_ver()[0], reason="the variable is glibc's")
def test_an_engine_asks_for_huge_pages() -> None:
    assert _asks_for_huge_pages(huge_page_environment()) and not _asks_for_huge_pages({})
