"""Peers and publishing over real ranks. Whole runs are in `test_spmd.py`."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from offbeat.aio import SideThread
from offbeat.cluster.publishers import WholePublisher
from offbeat.cluster.spmd_peers import Followed, FollowingPublisher, Published, RankPeers, make_release
from offbeat.config.inference import InferenceConfig
from offbeat.config.root import Config
from offbeat.inference.pool import EnginePool
from offbeat.weights.publish import PublishReport
from ranks import run_ranks

REPORT = PublishReport(3, 1.0, 0.1, 0.2, 0.3, 1e-7, ("engine 1",), {"engine 0": "its process died"})
PUBLISHED = Published(REPORT, {f"engine {i}": f"http://127.0.0.1:{9000 + i}" for i in range(3)})


def make_pool() -> EnginePool:
    return EnginePool([SimpleNamespace(name=name, url=url) for name, url in PUBLISHED.urls.items()], request_timeout_s=1)


def talk_and_publish(groups, _):
    """What a rank heard of its peers, and of two publishes: of whole weights, and of one that engines do not serve yet."""

    async def body() -> list:
        peers = RankPeers(groups.sync, SideThread("rank"))
        return [await talk(peers, groups.rank), await (lead(peers) if groups.rank == 0 else follow(peers))]

    async def talk(peers: RankPeers, rank: int) -> list:
        async def work() -> list[int]:
            return [rank, 7]

        led = await peers.lead("evaluate_fn", work, list[int])
        gathered = await peers.gather("save_heads", f"rank {rank}")
        await peers.meet("evaluate")
        return [led, gathered]

    async def lead(peers: RankPeers) -> bool:
        served: list[PublishReport] = []
        release = make_release(make_pool(), Config(), peers)
        await WholePublisher(Engines(), release).publish(3, on_served=served.append)
        await release(None)
        return served == [REPORT]

    async def follow(peers: RankPeers) -> bool:
        served: list[PublishReport] = []
        told: list[Published] = []
        given: list[int] = []

        async def give(version: int) -> None:
            given.append(version)

        publisher = FollowingPublisher(give, peers, 10.0, told.append)
        await publisher.publish(3, on_served=served.append)
        await publisher.publish(4, on_served=served.append)
        await publisher.settle()
        return served == [REPORT] and told == [PUBLISHED] and given == [3, 4]

    return asyncio.run(body())


class Engines:
    """Stands for the engines: a version is served at once."""

    async def publish(self, version: int) -> PublishReport:
        assert version == REPORT.version
        return REPORT


@pytest.fixture(scope="module")
def heard() -> list:
    """Of both ranks."""
    return run_ranks(talk_and_publish, world=2)


def test_everyone_gets_what_the_leader_gave_and_what_all_gave(heard: list) -> None:
    assert [talked for talked, _ in heard] == [[[0, 7], ["rank 0", "rank 1"]]] * 2


def test_all_ranks_learn_how_whole_weights_were_served_and_go_on_before_an_adapter_is(heard: list) -> None:
    assert [went_on for _, went_on in heard] == [True, True]


def test_a_rank_that_rolls_out_lets_only_the_engines_serve_that_rank_0_proved() -> None:
    pool = make_pool()
    followed = Followed(pool, InferenceConfig())
    followed.take(PUBLISHED)
    assert set(pool.healthy) == {"engine 1"}
    healed = replace(REPORT, version=4, serving=("engine 0", "engine 1"), quarantined={})
    followed.take(replace(PUBLISHED, report=healed))
    assert set(pool.healthy) == {"engine 0", "engine 1"}
    assert pool.client("engine 0").url == "http://127.0.0.1:9000"
