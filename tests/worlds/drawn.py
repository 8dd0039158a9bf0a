"""A world: the settings of a run, how long everything takes in it, and its faults, all drawn from one number."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

KINDS = {
    "kill": "the controller's process is killed",
    "power_cut": "all processes end, and writes that were not synced are lost",
    "engine_dies": "an engine's process ends",
    "engine_hangs": "an engine answers nothing for a while",
    "engine_lies": "an engine says that it has loaded weights, and keeps the ones before",
    "rank_dies": "a train rank's process ends",
    "rank_hangs": "a train rank does nothing for a while",
    "reward_dies": "the reward process ends",
    "reward_hangs": "the reward process does nothing for a while",
    "partition": "an engine cannot be reached for a while",
    "lost": "requests to engines, or their answers, are lost for a while",
    "twice": "requests that change an engine arrive twice for a while, the second time late",
    "disk_full": "nothing can be written for a while",
    "disk_slow": "every write takes seconds for a while",
    "clock_jumps": "the wall clock is set, by up to an hour in either direction",
    "stop": "the user asks the run to stop after its step, and starts it again",
    "rank_fails": "a rank of SPMD mode raises an error in the middle of its work",
    "engine_taken": "another run publishes to an engine by URL for a while",
    "engine_late": "a publish of an earlier start of the run reaches an engine by URL late",
}
"""Faults, in words."""

ENDS_LIFE = ("kill", "power_cut", "stop")
_OF_SOME = ("rank_fails", "engine_taken", "engine_late")
"""Faults that only some worlds have, and that are drawn there by themselves."""
_AT_ONCE = (*ENDS_LIFE, "rank_dies", "rank_fails", "reward_dies", "engine_late")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        life: start of the run in which it happens, from 0.
        at_s: virtual seconds after that start.
        kind: one of `KINDS`.
        who: number of the engine or rank.
        for_s: how long it lasts, or by how much a clock jumps.
    """

    life: int
    at_s: float
    kind: str
    who: int = 0
    for_s: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.for_s:g} s" if self.kind not in _AT_ONCE else ""
        whom = f" {self.who}" if self.kind.partition("_")[0] in ("engine", "rank", "partition") else ""
        return f"start {self.life}, after {self.at_s:g} s: {self.kind}{whom}{lasts}"


@dataclass(frozen=True)
class World:
    """What was drawn.

    Attributes:
        settings: of the run, by "section.key".
        num_rows: rows of the data set that are trained on.
        turns: times an episode asks the engine.
        token_s, train_s, stage_s, prove_s, write_s, start_s: mean time of a token, a step, a staging, a proof, a writing of weights, a
            start of a process.
        straggler: share of requests that take ten times as long.
        reward_fails: share of failed rewards.
        goes_on: whether an engine finishes what it was asked although nobody waits any more.
        faults: in any order.
        by_url: whether engines were there before the run, outlive it, and might be used by others.
        apart: whether each rank of SPMD mode is on a machine of its own, so that the others do not see how its process is.
    """

    seed: int
    settings: Mapping[str, Any]
    num_rows: int
    turns: int
    token_s: float
    train_s: float
    stage_s: float
    prove_s: float
    write_s: float
    start_s: float
    straggler: float
    reward_fails: float
    goes_on: bool
    faults: tuple[Fault, ...]
    by_url: bool = False
    apart: bool = False

    @property
    def lora(self) -> bool:
        return bool(self.settings["model.lora.rank"])

    @property
    def spmd(self) -> bool:
        return self.settings.get("run.mode") == "spmd"

    @property
    def num_heads(self) -> int:
        """Processes that draw prompts."""
        return 1 if not self.spmd or self.settings["rollout.single_rank_load"] else self.settings["train.num_ranks"]

    @property
    def keeps_running(self) -> bool:
        """Whether tokens of unfinished samples that the run was told of are never generated again, but go on after a kill.

        Not where something else than a kill ends what runs: engines that fail, disks, prompts that are drawn again.
        """
        settings = self.settings
        return bool(
            settings["checkpoint.journal"] and settings["rollout.on_stale"] != "requeue" and not self.reward_fails
            and {fault.kind for fault in self.faults} <= {
                "kill", "clock_jumps", "stop", "rank_dies", "rank_hangs", "rank_fails"})

    @property
    def eta(self) -> int:
        return self.settings["rollout.max_head_offpolicyness"]

    @property
    def batch_size(self) -> int:
        return self.settings["rollout.consumer_batch_size"]

    @property
    def num_steps(self) -> int:
        return self.settings["run.total_steps"]

    def without(self, index: int) -> "World":
        """Return the world without one of its faults."""
        return replace(self, faults=self.faults[:index] + self.faults[index + 1 :])


def draw(seed: int) -> World:
    """Draw a world of a controller."""
    return _by_url(_draw(seed))


def _draw(seed: int) -> World:
    rng = random.Random(seed)
    num_engines, batch_size = rng.choice([1, 1, 2, 3]), rng.randint(1, 3)
    steps = rng.randint(3, 6)
    num_ranks = rng.choice([1, 1, 1, 2])
    turns = rng.choice([1, 1, 1, 3])
    lora = rng.random() < 0.35
    settings = {
        "run.total_steps": steps, "run.seed": seed, "data.heldout_size": rng.choice([0, 2, 2]), "model.lora.rank": 4 if lora else 0,
        "train.num_ranks": num_ranks, "train.step_timeout_s": 600.0, "dist.sync_timeout_s": 120.0,
        "rollout.group_size": 2, "rollout.consumer_batch_size": batch_size, "rollout.max_concurrent_rollouts": rng.randint(1, 8),
        "rollout.max_new_tokens": 4, "rollout.max_head_offpolicyness": rng.choice([0, 0, 1, 1, 2, 3]),
        "rollout.on_stale": rng.choice(["wait", "wait", "requeue"]), "rollout.reward": "worlds.given:reward",
        "rollout.workflow": "worlds.given:several_turns" if turns > 1 else "single_turn", "rollout.reward_timeout_s": 15.0,
        "algorithm.dynamic_sampling": rng.random() < 0.25, "inference.num_engines": num_engines,
        "inference.min_engines": rng.choice([1, 1, num_engines]), "inference.heal_timeout_s": 2000.0, "inference.request_timeout_s": 300.0,
        "weights.keep": rng.choice([1, 2]), "weights.stage_timeout_s": 120.0, "evaluate.every_steps": rng.choice([0, 1, 3]),
        "evaluate.keep_samples": False, "checkpoint.every_steps": rng.choice([0, 1, 2, 3]), "checkpoint.keep": rng.choice([1, 2]),
        "checkpoint.every_minutes": rng.choice([0.0, 0.0, 1.0]), "checkpoint.export": rng.random() < 0.3,
        "checkpoint.journal": rng.random() < 0.85, "cluster.take_turns": num_engines < 3 and rng.random() < 0.15,
        "telemetry.rollouts_every_steps": rng.choice([0, 0, 1]), "telemetry.trace": False,
        "train.threads": 1, "inference.threads": 1,
    }
    intervals = random.Random(f"{seed} intervals")
    settings |= {
        "inference.probe_interval_s": intervals.choice([2.0, 15.0, 30.0]),
        "checkpoint.journal_running_s": intervals.choice([1.0, 5.0, 20.0])}
    more = random.Random(f"{seed} more")  # what was added later leaves the other draws of a number as they are
    world = World(
        seed=seed, settings=settings, num_rows=rng.choice([5, 9, 40]), turns=turns, token_s=rng.choice([0.05, 0.5, 3]),
        train_s=rng.choice([1, 10, 30]), stage_s=rng.choice([0.1, 5, 30]),
        prove_s=more.choice([0.05, 5, 20]), write_s=rng.choice([0.2, 3]), start_s=rng.choice([0.5, 5]),
        straggler=rng.choice([0, 0.05, 0.2]), reward_fails=rng.choice([0, 0, 0.05]), goes_on=rng.random() < 0.5, faults=())
    faults = _draw_faults(world, rng)
    if more.random() < 0.2:
        faults = (*faults, Fault(0, round(more.uniform(0.2, 1) * _span_s(world), 2), "engine_lies", more.randrange(num_engines), 100.0))
    if intervals.random() < 0.08:
        return _with_kills_of_long_samples(world, intervals)
    return replace(world, faults=faults)


def _with_kills_of_long_samples(world: World, rng: random.Random) -> World:
    """Return a world in which nothing but kills goes wrong, while samples run for long, since those have to go on after them."""
    world = replace(world, token_s=3.0, reward_fails=0.0, settings={
        **world.settings, "checkpoint.journal": True, "checkpoint.journal_running_s": rng.choice([1.0, 5.0]), "rollout.on_stale": "wait",
        "rollout.max_new_tokens": 8})
    return replace(world, faults=tuple(
        Fault(life, round(rng.uniform(0.1, 0.9) * _span_s(world), 2), "kill") for life in range(rng.randint(1, 3))))


def draw_spmd(seed: int) -> World:
    """Draw a world in SPMD mode: the same as `draw` does, but for what cannot be there, and more faults of ranks."""
    world, rng = _draw(seed), random.Random(f"{seed} spmd")
    num_ranks, one_loads = rng.choice([2, 2, 2, 3]), rng.random() < 0.4
    settings = {
        **world.settings, "run.mode": "spmd", "train.num_ranks": num_ranks, "rollout.single_rank_load": one_loads,
        "cluster.take_turns": False}
    if not one_loads:
        settings |= {
            "model.lora.rank": 0, "rollout.balance_batch": False, "rollout.consumer_batch_size": world.batch_size + num_ranks - 1}
    world = replace(world, settings=settings, faults=())
    faults = list(_draw_faults(world, rng))
    for kind in ("engine_lies", "engine_dies", "rank_dies", "rank_hangs"):
        if rng.random() < 0.25:
            who = rng.randrange(num_ranks if kind.startswith("rank") else settings["inference.num_engines"])
            faults.append(Fault(0, round(rng.uniform(0.2, 1) * _span_s(world), 2), kind, who, rng.choice([20.0, 100.0, 400.0])))
    more = random.Random(f"{seed} machines")
    if more.random() < 0.35:
        faults.append(Fault(0, round(more.uniform(0.1, 1) * _span_s(world), 2), "rank_fails", more.randrange(num_ranks)))
    return _by_url(replace(world, faults=tuple(faults), apart=more.random() < 0.4))


def _by_url(world: World) -> World:
    """Return the world, or the same with engines by URL to which others try to publish."""
    rng = random.Random(f"{world.seed} urls")
    if rng.random() >= 0.12:
        return world
    num_engines = world.settings["inference.num_engines"]
    urls = [url_of(number) for number in range(num_engines)]
    num_ends = sum(fault.kind in ENDS_LIFE for fault in world.faults)
    faults = []
    for _ in range(rng.choice([1, 2, 3])):
        life = rng.randint(0, num_ends)
        kind = rng.choice(["engine_taken", "engine_late"] if life else ["engine_taken"])
        at_s = round(rng.uniform(0.1, 1) * _span_s(world), 2)
        faults.append(Fault(life, at_s, kind, rng.randrange(num_engines), round(rng.choice([5, 60, 200]) * rng.random(), 2)))
    settings = {**world.settings, "inference.urls": urls, "cluster.take_turns": False}
    return replace(world, settings=settings, faults=(*world.faults, *faults), by_url=True)


def url_of(number: int) -> str:
    """Return the URL of the engine that is the first, second, ... to listen, from 0."""
    return f"http://sim:{number + 1}"


def _span_s(world: World) -> float:
    """Return about how long the run takes without faults."""
    return 10 + world.num_steps * (world.train_s + 8 * world.token_s * world.turns + world.stage_s)


def _draw_faults(world: World, rng: random.Random) -> tuple[Fault, ...]:
    settings = world.settings
    span_s = _span_s(world)
    faults, life = [], 0
    others = [kind for kind in KINDS if kind not in (*ENDS_LIFE, *_OF_SOME)]
    for _ in range(rng.choice([0, 1, 2, 3, 5])):
        kind = rng.choice([*ENDS_LIFE, "kill", *rng.choices(others, k=4)])
        many = settings["train.num_ranks"] if kind.startswith("rank") else settings["inference.num_engines"]
        for_s = rng.uniform(-3600, 3600) if kind == "clock_jumps" else rng.choice([5, 60, 400]) * rng.random()
        if kind in ("engine_hangs", "rank_hangs") and rng.random() < 0.2:
            for_s = 1e9
        faults.append(Fault(life, round(rng.uniform(0, span_s), 2), kind, rng.randrange(many), round(for_s, 2)))
        life += kind in ENDS_LIFE
    return tuple(faults)
