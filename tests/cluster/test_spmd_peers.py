"""Peers and publishing over real ranks. Whole runs are in `test_spmd.py`."""

import asyncio
from types import SimpleNamespace

from offbeat.aio import SideThread
from offbeat.cluster.spmd_peers import RankPeers, RankPublisher, admit_into
from offbeat.inference.pool import EnginePool
from offbeat.weights.publish import PublishReport
from ranks import run_ranks

REPORT = PublishReport(3, 1.0, 0.1, 0.2, 0.3, 1e-7, ("engine 1",), {"engine 0": "its process died"})


def talk(groups, _):
    async def body() -> list:
        peers = RankPeers(groups.sync, SideThread("rank"))

        async def work() -> list[int]:
            return [groups.rank, 7]

        led = await peers.lead("evaluate_fn", work, list[int])
        gathered = await peers.gather("save_heads", f"rank {groups.rank}")
        await peers.meet("evaluate")
        heard: list[PublishReport] = []

        async def publish(version: int) -> PublishReport | None:
            return REPORT if groups.rank == 0 and version == 3 else None

        report = await RankPublisher(publish, peers, 10.0, heard.append).publish(3)
        assert heard == [report]
        return [led, gathered, report == REPORT]

    return asyncio.run(body())


def test_everyone_gets_what_the_leader_gave_and_what_all_gave() -> None:
    assert run_ranks(talk, world=2) == [[[0, 7], ["rank 0", "rank 1"], True]] * 2


def test_a_rank_that_rolls_out_lets_only_the_engines_serve_that_rank_0_proved() -> None:
    pool = EnginePool([SimpleNamespace(name=f"engine {i}") for i in range(3)], request_timeout_s=1)
    admit_into(pool, REPORT)
    assert set(pool.healthy) == {"engine 1"}
