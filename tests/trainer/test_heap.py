"""Memory that was freed goes back to the system, in a process that keeps it by itself as a rank does."""

import os
import subprocess
import sys

import pytest

from offbeat.workers.worker import library_environment

PROGRAM = """
import numpy as np
from offbeat.trainer.heap import Heap

heap = Heap(slack_bytes=64 << 20)
before = heap.resident_bytes
kept = []

def pass_once():
    large = []
    for _ in range(30):
        large.append(np.ones(10 << 17))  # 10 MiB each
        kept.append(np.ones(100))  # so that the top of the heap is in use, as it is in any program

pass_once()
after = heap.resident_bytes
settled, again = heap.return_free(), heap.return_free()
left = heap.resident_bytes
pass_once()
print(after - before >> 20, left - before >> 20, Heap().resident_bytes - before >> 20, settled, again)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_a_process_that_keeps_what_it_frees_gives_back_what_a_large_pass_left() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | library_environment(1), capture_output=True, text=True, check=True, timeout=60)
    grown, left, left_at_start, settled, again = found.stdout.split()
    assert int(grown) > 250, "otherwise there is nothing to give back"
    assert int(left) < 30 and (settled, again) == ("True", "False")
    assert int(left_at_start) < 30, "what came before the heap is looked after"
