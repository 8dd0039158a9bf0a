"""Peers and publishing over real ranks. Whole runs are in `test_spmd.py`."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

from offbeat.aio import SideThread
from offbeat.cluster.spmd_peers import Followed, Published, RankPeers, RankPublisher
from offbeat.config.inference import InferenceConfig
from offbeat.inference.pool import EnginePool
from offbeat.weights.publish import PublishReport
from ranks import run_ranks

REPORT = PublishReport(3, 1.0, 0.1, 0.2, 0.3, 1e-7, ("engine 1",), {"engine 0": "its process died"})
PUBLISHED = Published(REPORT, {f"engine {i}": f"http://127.0.0.1:{9000 + i}" for i in range(3)})


def talk(groups, _):
    async def body() -> list:
        peers = RankPeers(groups.sync, SideThread("rank"))

        async def work() -> list[int]:
            return [groups.rank, 7]

        led = await peers.lead("evaluate_fn", work, list[int])
        gathered = await peers.gather("save_heads", f"rank {groups.rank}")
        await peers.meet("evaluate")
        heard: list[Published] = []

        async def publish(version: int) -> Published | None:
            return PUBLISHED if groups.rank == 0 and version == 3 else None

        report = await RankPublisher(publish, peers, 10.0, heard.append).publish(3)
        assert heard == [PUBLISHED]
        return [led, gathered, report == REPORT]

    return asyncio.run(body())


def test_everyone_gets_what_the_leader_gave_and_what_all_gave() -> None:
    assert run_ranks(talk, world=2) == [[[0, 7], ["rank 0", "rank 1"], True]] * 2


def test_a_rank_that_rolls_out_lets_only_the_engines_serve_that_rank_0_proved() -> None:
    pool = EnginePool([SimpleNamespace(name=f"engine {i}", url="") for i in range(3)], request_timeout_s=1)
    followed = Followed(pool, InferenceConfig())
    followed.take(PUBLISHED)
    assert set(pool.healthy) == {"engine 1"}
    healed = replace(REPORT, version=4, serving=("engine 0", "engine 1"), quarantined={})
    followed.take(replace(PUBLISHED, report=healed))
    assert set(pool.healthy) == {"engine 0", "engine 1"}
    assert pool.client("engine 0").url == "http://127.0.0.1:9000"
