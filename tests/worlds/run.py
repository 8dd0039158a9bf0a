"""`make worlds`: simulated runs by number, in virtual time, while engines, processes and the disk fail. See docs/worlds.md.

    tests/worlds/run.py                      worlds 0 to 9,999; goes on where an earlier call has stopped
    tests/worlds/run.py --seed 4711          one world, with its ledger, shrunk if it fails
    tests/worlds/run.py --mutant NAME        worlds of a product with a planted defect, until one finds it; "all" for each.
                                             A world that fails without it, too, does not count

Exit 1 if a run did not do as promised, or a defect was not found.
"""

import argparse
import gc
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from worlds.drawn import World, draw, draw_spmd
from worlds.explore import Lived, explore, find_defect, live_world, shrink
from worlds.mutants import IN_SPMD, MUTANTS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "worlds"
_MEMORY = Path("/dev/shm")
"""A file system in memory, on which worlds are lived where there is one: they sync their files often."""

_SCRATCH = "offbeat-worlds-"
"""Beginning of the name of a call's folder, which the number of its process follows."""

_MOST = 500
"""Worlds within which a planted defect has to be found."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first world")
    parser.add_argument("--count", type=int, default=10_000, help="number of worlds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--anew", action="store_true", help="forget what earlier calls have done")
    parser.add_argument("--seed", type=int, help="live this world alone, keep its folder, and shrink it if it fails")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where it is written which worlds were lived")
    parser.add_argument("--spmd", action="store_true", help="worlds of SPMD mode, which have numbers of their own")
    parser.add_argument("--mutant", choices=[*MUTANTS, "all"], help="plant a defect first")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of words have another order in each process
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    args.folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the scratch folder is removed
    scratch = _make_scratch(_MEMORY if _MEMORY.is_dir() else args.folder)
    gc.freeze()  # each life is a fork of this process
    try:
        if args.seed is not None:
            return _show(args.seed, args.folder, args.mutant, spmd=args.spmd or args.mutant in IN_SPMD)
        if args.mutant:
            names = [*MUTANTS] if args.mutant == "all" else [args.mutant]
            seeds = range(args.first, args.first + min(args.count, _MOST))
            return max([_hunt(name, seeds, scratch, processes=args.processes, spmd=name in IN_SPMD) for name in names])
        return _explore(
            range(args.first, args.first + args.count), args.folder, scratch, processes=args.processes, anew=args.anew, spmd=args.spmd)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _make_scratch(where: Path) -> Path:
    """Make this call's folder of worlds; removes those of earlier calls that were killed."""
    for folder in where.glob(f"{_SCRATCH}*"):
        process = folder.name.removeprefix(_SCRATCH)
        if process.isdecimal() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    scratch = where / f"{_SCRATCH}{os.getpid()}"
    scratch.mkdir(exist_ok=True)
    return scratch


def _explore(seeds: range, folder: Path, scratch: Path, *, processes: int, anew: bool, spmd: bool) -> int:
    """Live worlds, skip those that an earlier call has lived, and tell of failures."""
    done_file = folder / ("done-spmd.txt" if spmd else "done.txt")
    if anew:
        done_file.unlink(missing_ok=True)
    done = set(map(int, done_file.read_text().split())) if done_file.exists() else set()
    start_s, before = time.monotonic(), _cpu_s()
    num_failed = num_lives = number = 0
    todo = [seed for seed in seeds if seed not in done]
    try:
        with done_file.open("a") as file:
            for number, lived in enumerate(_lived(todo, scratch, processes, spmd=spmd), 1):
                num_lives += lived.num_lives
                if lived.wrong:
                    num_failed += 1
                    _tell(lived)
                else:
                    print(lived.world.seed, file=file, flush=True)
                if number % 100 == 0:
                    print(f"{number} of {len(todo)} worlds, {num_failed} failed, {time.monotonic() - start_s:.0f} s", flush=True)
    finally:  # a call that is ended tells how far it has come
        cpu_s = _cpu_s() - before
        print(json.dumps({
            "worlds": number, "failed": num_failed, "starts": num_lives, "wall_s": round(time.monotonic() - start_s, 1),
            "cpu_s": round(cpu_s, 1), "cpu_s_per_world": round(cpu_s / max(number, 1), 3), "lived_before": len(seeds) - len(todo)}))
    return 1 if num_failed else 0


def _hunt(name: str, seeds: range, folder: Path, *, processes: int, spmd: bool) -> int:
    """Live worlds of a product with a defect until one finds it."""
    hunt = find_defect(_lived(seeds, folder, processes, name, spmd=spmd), lambda seed: _live_one(seed, folder, "", spmd))
    for lived in hunt.unsound:
        print(json.dumps({"mutant": name, "fails_without_it": lived.world.seed, "wrong": lived.wrong[0][:300]}), flush=True)
    told = {"found_by": hunt.num_lived, "seed": hunt.finds.world.seed, "wrong": hunt.finds.wrong[0][:300]} if hunt.finds else {
        "found_by": None, "worlds": hunt.num_lived}
    print(json.dumps({"mutant": name, **told}), flush=True)
    return 0 if hunt.finds and not hunt.unsound else 1


def _lived(seeds: Sequence[int], folder: Path, processes: int, mutant: str = "", *, spmd: bool) -> Iterator[Lived]:
    """Live worlds in several processes, and give each in the order of their numbers."""
    one = partial(_live_one, folder=folder, mutant=mutant, spmd=spmd)
    if processes == 1:
        yield from map(one, seeds)
        return
    # An error raised by a signal may be swallowed where it arrives, and the pool would wait for its process for ever.
    end_at_once = partial(signal.signal, signal.SIGTERM, signal.SIG_DFL)
    with multiprocessing.get_context("fork").Pool(processes, end_at_once) as pool:
        yield from pool.imap(one, seeds)


def _live_one(seed: int, folder: Path, mutant: str, spmd: bool) -> Lived:
    return explore(seed, folder / f"process-{os.getpid()}", spmd=spmd, prepare=MUTANTS[mutant] if mutant else _nothing)


def _nothing() -> None:
    pass


def _show(seed: int, where: Path, mutant: str | None, *, spmd: bool) -> int:
    folder, prepare = where / f"seed-{seed}", MUTANTS[mutant] if mutant else _nothing
    lived = live_world(draw_spmd(seed) if spmd else draw(seed), folder, prepare=prepare, keep=True)
    if not lived.wrong:
        print(f"world {seed} did as promised in {lived.num_lives} starts; its ledger is {folder / 'ledger.jsonl'}")
        return 0
    _tell(lived)

    def fails(world: World) -> bool:
        return bool(live_world(world, folder, prepare=prepare, keep=True).wrong)

    small = shrink(lived.world, fails)
    print("shrunk to these faults:", *map(str, small.faults), sep="\n    ")
    again = live_world(small, folder, prepare=prepare, keep=True)
    print("which fail with:", *(text[:3000] for text in again.wrong), f"ledger: {folder / 'ledger.jsonl'}", sep="\n    ")
    return 1


def _tell(lived: Lived) -> None:
    print(
        f"world {lived.world.seed} failed in {lived.num_lives} starts; live it again with tests/worlds/run.py"
        f" {'--spmd ' if lived.world.spmd else ''}--seed {lived.world.seed}",
        *(text[:1500] for text in lived.wrong[:3]), *map(str, lived.world.faults), sep="\n    ", flush=True)


def _cpu_s() -> float:
    return sum(
        used.ru_utime + used.ru_stime for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


if __name__ == "__main__":
    sys.exit(main())
