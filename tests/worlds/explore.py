"""Lives worlds by number, and shrinks those that fail. `make worlds` and the tests call it."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy.ma  # noqa: F401  (this and the next are imported here once, and not in each life)

import worlds.given  # noqa: F401
from offbeat.controller import inputs, template_choice
from offbeat.data.ends import find_ends
from offbeat.data.tokenizer import character_tokenizer, load_tokenizer
from offbeat.machine import torch_is_for_cpus
from offbeat.process.serving import die_with_parent
from offbeat.runs import assemble, devices  # noqa: F401
from offbeat.runs.plan import versions
from offbeat.workers import local  # noqa: F401
from worlds.account import violations
from worlds.drawn import World, draw, draw_spmd
from worlds.life import Life, complete, configure, live

# Read from files and compiled here once, and not in each life.
versions()
find_ends(character_tokenizer())
devices.torch_is_for_cpus = cache(torch_is_for_cpus)
devices.torch_is_for_cpus()
inputs.load_tokenizer = template_choice.load_tokenizer = cache(load_tokenizer)

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


def life_of(world: World) -> type[Life]:
    """Return what lives a world; that of SPMD mode imports torch, which a controller's is spared."""
    return import_module("worlds.spmd_life").SpmdLife if world.spmd else Life


def live_world(world: World, folder: Path, *, prepare: Callable[[], None] = lambda: None, keep: bool = False) -> Lived:
    """Live a world from its first start to its end.

    Args:
        folder: of the world, made anew; removed afterwards, unless something was wrong or `keep` is set.
        prepare: called in the process of each life, to plant a mutant.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = configure(world, folder)
    inputs.load_tokenizer(config.model.path)
    life_of(world)
    number = 0
    explorer = os.getpid()
    while number < MOST_LIVES:
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(explorer)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                prepare()
                live(life_of(world), world, config, folder, number)
            finally:
                os._exit(4)
        number += 1
        try:
            _, status = os.waitpid(pid, 0)
        except BaseException:  # such as by SIGTERM
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
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
    last = json.loads((folder / "ledger.jsonl").read_text().splitlines()[-1])
    return ("ended" in last and not complete(last)) or bool(last.get("stopped"))


@dataclass(frozen=True)
class Hunt:
    """A search for a planted defect.

    Attributes:
        num_lived: worlds that were lived with the defect.
        finds: the first that failed with it and did not without it; None if there was none.
        unsound: worlds before it that failed without the defect, too.
    """

    num_lived: int
    finds: Lived | None
    unsound: tuple[Lived, ...]


def find_defect(lived: Iterable[Lived], live_without: Callable[[int], Lived]) -> Hunt:
    """Go through worlds of a product with a defect until one finds it; `live_without` lives a world by number without the defect."""
    number, unsound = 0, []
    for number, each in enumerate(lived, 1):
        if each.wrong:
            without = live_without(each.world.seed)
            if not without.wrong:
                return Hunt(number, each, tuple(unsound))
            unsound.append(without)
    return Hunt(number, None, tuple(unsound))


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


def explore(seed: int, folder: Path, *, spmd: bool = False, prepare: Callable[[], None] = lambda: None) -> Lived:
    """Draw a world, of SPMD mode or of a controller, and live it."""
    return live_world(draw_spmd(seed) if spmd else draw(seed), folder / f"world-{seed}", prepare=prepare)
