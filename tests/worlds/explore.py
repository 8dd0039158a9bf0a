"""Lives worlds by number, and shrinks those that fail. `make worlds` and the tests call it."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy.ma  # noqa: F401  (this and the next are imported here once, and not in each life)

import worlds.given  # noqa: F401
from offbeat.data.ends import find_ends
from offbeat.data.tokenizer import character_tokenizer
from offbeat.runs import assemble  # noqa: F401
from offbeat.runs.plan import versions
from offbeat.workers import local  # noqa: F401
from worlds.account import violations
from worlds.drawn import World, draw
from worlds.life import live

# Read from files and compiled here once, and not in each life.
versions()
find_ends(character_tokenizer())

MOST_LIVES = 14
"""Starts of a run, after which it has to have come to its end: faults end a life at most six times, and errors the others."""


@dataclass(frozen=True)
class Lived:
    """What came of a world.

    Attributes:
        wrong: what the run did against its promises.
        num_lives: starts of the run.
    """

    world: World
    wrong: tuple[str, ...]
    num_lives: int


def live_world(world: World, folder: Path, *, prepare: Callable[[], None] = lambda: None, keep: bool = False) -> Lived:
    """Live a world from its first start to its end.

    Args:
        folder: of the world, made anew; removed afterwards, unless something was wrong or `keep` is set.
        prepare: called in the process of each life, to plant a mutant.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    number = 0
    while number < MOST_LIVES:
        pid = os.fork()
        if pid == 0:
            try:
                prepare()
                live(world, folder, number)
            finally:
                os._exit(4)
        number += 1
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, 9):
            return Lived(world, (f"life {number - 1} ended with {code}: {(folder / 'out.log').read_text()[-2000:]}",), number)
        if code == 0 and not _goes_on(folder):
            break
    wrong = tuple(violations(world, folder))
    if not wrong and not keep:
        shutil.rmtree(folder)
    return Lived(world, wrong, number)


def _goes_on(folder: Path) -> bool:
    """Whether the last life ended before the run's last step, by an error or because it was asked to."""
    last = (folder / "ledger.jsonl").read_text().splitlines()[-1]
    return '"ended"' in last or '"stopped": true' in last


def shrink(world: World, fails: Callable[[World], bool]) -> World:
    """Return the world without the faults that it does not need to fail."""
    index = 0
    while index < len(world.faults):
        smaller = world.without(index)
        if fails(smaller):
            world = smaller
        else:
            index += 1
    return world


def explore(seed: int, folder: Path, *, prepare: Callable[[], None] = lambda: None) -> Lived:
    """Draw a world and live it."""
    return live_world(draw(seed), folder / f"world-{seed}", prepare=prepare)
