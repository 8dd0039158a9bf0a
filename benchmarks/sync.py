"""What a name costs: a named barrier against a plain gloo barrier, and how soon a rank that does not come is named.

Both barriers are done by the same ranks on this machine, 2, 4 and 8 of them, in blocks of 50 that alternate; each block's median over the
rounds counts, as rank 0 sees it. Then 4 ranks miss points with a deadline of 1 s: one is slow, one is stopped, and one is killed while
the others wait. The time past the deadline, or since the kill, stands against the 2 s that are promised.

    python benchmarks/sync.py [--quick] [--repeats 20]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from measure import emit, note, take_turns

from offbeat.config.dist import DistConfig
from offbeat.errors import SyncError
from offbeat.sync.links import MeetingPlace
from offbeat.sync.mesh import ProcessGroups, connect_store, host_store, join, leave

AIM = 0.5
"""A named barrier takes at most twice as long as a plain one."""

BLOCK = 50
DEADLINE_S = 1.0
PROMISED_S = 2.0
ABSENT_S = 4.0
STORE_TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 ranks, three rounds")
    parser.add_argument("--repeats", type=int, default=20, help="rounds; the median counts (default: 20)")
    parser.add_argument("--rank", type=int, nargs=4, metavar=("RANK", "WORLD", "PORT", "REPEATS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(*args.rank)
        return
    for world in [2] if args.quick else [2, 4, 8]:
        result = start_ranks(world, repeats=3 if args.quick else args.repeats)
        emit("sync", f"named barrier vs gloo barrier, {world} ranks", ours=result["named"], peer=result["gloo"], unit="us", aim=AIM,
             less_is_better=True)
        for fault, seconds in result["detection"].items():
            emit("sync", f"{fault} rank of {world} named, vs promised", ours=seconds, peer=PROMISED_S, unit="s", aim=1.0,
                 less_is_better=True)


def start_ranks(world: int, *, repeats: int) -> dict:
    """Rank 0's figures."""
    store = host_store(STORE_TIMEOUT_S)
    ranks = [
        subprocess.Popen(
            [sys.executable, Path(__file__), "--rank", str(rank), str(world), str(store.port), str(repeats)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=None if rank == 0 else subprocess.DEVNULL, text=True)
        for rank in range(world)]
    try:
        output, _ = ranks[0].communicate(timeout=600)
        return json.loads(output.splitlines()[-1])
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def run_rank(rank: int, world: int, port: int, repeats: int) -> None:
    """One process: barriers, then faults."""
    store = connect_store("127.0.0.1", port, timeout_s=STORE_TIMEOUT_S)
    groups = join(rank=rank, world=world, place=MeetingPlace(store), config=DistConfig())

    def plain() -> None:
        dist.barrier(group=groups.cpu_group)  # noqa: TID251 - what we compare with

    sides = {"named": timed(lambda: groups.sync.barrier("benchmark")), "gloo": timed(plain)}
    for side in sides.values():
        side(0)  # the warm-up
    medians = take_turns(sides, repeats=repeats, what=f"{world} ranks, rank {rank},")
    figures = {name: median["us"] for name, median in medians.items()}
    detection = {fault.__name__: fault(groups) for fault in (slow, stopped, killed)}
    print(json.dumps({**figures, "detection": detection}), flush=True)
    leave()


def timed(act: Callable[[], None]) -> Callable[[int], dict[str, float]]:
    """A side of `take_turns`: microseconds per call."""

    def block(_round: int) -> dict[str, float]:
        started = time.perf_counter()
        for _ in range(BLOCK):
            act()
        return {"us": (time.perf_counter() - started) / BLOCK * 1e6}

    return block


def slow(groups: ProcessGroups) -> float:
    """Seconds past the deadline until a rank that sleeps is named."""
    return missed(groups, lambda: time.sleep(ABSENT_S), "rank 1 is slow")


def stopped(groups: ProcessGroups) -> float:
    """Seconds past the deadline until a stopped rank is named."""

    def stop() -> None:
        subprocess.Popen(["sh", "-c", f"sleep {ABSENT_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    return missed(groups, stop, "rank 1 is stopped")


def killed(groups: ProcessGroups) -> float:
    """Seconds from a rank's kill until it is named."""
    groups.sync.barrier("together")
    when_s = float(groups.sync.broadcast("when", f"{time.time() + 1.0}".encode() if groups.rank == 0 else None))
    if groups.rank == 1:
        time.sleep(max(0.0, when_s - time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    text = miss(groups, timeout_s=60.0)
    assert "rank 1 was killed by SIGKILL" in text, text
    return time.time() - when_s


def missed(groups: ProcessGroups, absent: Callable[[], None], named: str) -> float:
    """Seconds past the deadline."""
    groups.sync.barrier("together")
    started = time.monotonic()
    if groups.rank == 1:
        absent()
    text = miss(groups, timeout_s=DEADLINE_S)
    past_s = time.monotonic() - started - DEADLINE_S
    assert named in text, text
    return past_s


def miss(groups: ProcessGroups, *, timeout_s: float) -> str:
    """The error's text."""
    try:
        groups.sync.barrier("missed", timeout_s=timeout_s)
    except SyncError as exc:
        note(f"rank {groups.rank}: {exc}")
        return str(exc)
    raise AssertionError("all ranks came")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
