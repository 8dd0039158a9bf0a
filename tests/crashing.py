"""Runs on pairs with real ranks that crash at a step, and what they have recorded."""

import asyncio
from pathlib import Path

import pytest

from offbeat.aio import SideThread
from offbeat.config.root import Config
from offbeat.controller.parts import RunParts
from offbeat.controller.state import RunState
from offbeat.controller.supervised import Lesson, SftResult, teach
from offbeat.ranks.sharding import Sharder
from offbeat.ranks.trainers import Trainers
from offbeat.runs.rollouts import NoEngines
from offbeat.spmd.peers import RankPeers
from offbeat.spmd.ranks import OneRankLoads, OwnRank
from offbeat.telemetry.console import Console
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.record import RunRecord, SilentRecord
from offbeat.trainer.worker import build_trainers
from small_run import small_config


class CrashError(Exception):
    """The run is gone."""


class Crashing(Trainers):
    """Real trainers, which end at a step."""

    at = 0

    async def train_step(self, batch, *, num_minibatches=1):
        if self._step + 1 == self.at:
            raise CrashError
        return await super().train_step(batch, num_minibatches=num_minibatches)


def play_pairs(groups, config: Config, lesson: type[Lesson], *, crash_at: int = 0) -> SftResult:
    """One process's part of a run that learns from pairs."""
    inputs, state = lesson.read(config), RunState(total_steps=1)
    thread = SideThread("rank")
    loads = OneRankLoads(groups.sync, Sharder.of(config.for_ranks, model=config.model.path, num_ranks=groups.world))
    own = build_trainers(config.model.path, config.for_ranks, groups, trains=inputs.trains)
    trainers = Crashing(OwnRank(own, loads, thread), config.for_ranks)
    trainers.at = crash_at
    leads = groups.rank == 0
    none = NoEngines(draws=leads)
    with RunRecord(config.run_dir, trace=False, console=Console("quiet")) if leads else SilentRecord(config.run_dir) as record:
        parts = RunParts(config, record, inputs, trainers, none, none, RankPeers(groups.sync, thread), none.watch)
        try:
            return asyncio.run(teach(parts, state, lesson(parts, state)))
        finally:
            thread.close()


_MEASURED = ("_s", "_s_per_device", "busy_share", "mfu", "_memory_bytes")


def rows_of(config: Config) -> list[dict]:
    """What metrics.jsonl says of the steps, but for the time and the memory they took."""
    rows = read_json_lines(config.run_dir / "metrics.jsonl")
    return [{n: value for n, value in row.items() if not n.endswith(_MEASURED) and not n.startswith("balance/")} for row in rows]


def whole_and_cut(groups, argument: dict, play) -> list[list[dict]] | None:
    """Play a run without a break, and one that crashes after its checkpoint of step 2; what both recorded, on rank 0."""
    whole, cut = (small_config(Path(argument["root"]) / name, argument["model"], **argument["settings"]) for name in ("whole", "cut"))
    play(groups, whole)
    with pytest.raises(CrashError):
        play(groups, cut, crash_at=4)
    play(groups, cut)
    return [rows_of(whole), rows_of(cut)] if groups.rank == 0 else None
