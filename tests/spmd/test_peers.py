"""Peers and publishing over real ranks. Whole runs are in `test_rank.py`."""

import asyncio
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.aio import SideThread, beside
from offbeat.config.inference import InferenceConfig
from offbeat.errors import EngineError
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.publication import PublishReport
from offbeat.spmd.peers import EngineNews, Followed, FollowingPublisher, Published, RankPeers, make_release
from offbeat.sync.mesh import connect_store, host_store
from offbeat.sync.notice import Notice
from ranks import run_ranks
from waiting import until

REPORT = PublishReport(3, 1.0, 0.1, 0.2, 0.3, 1e-7, ("engine 1",), {"engine 0": "its process died"})
PUBLISHED = Published(REPORT, {f"engine {i}": f"http://127.0.0.1:{9000 + i}" for i in range(3)})


def make_pool() -> EnginePool:
    return EnginePool([SimpleNamespace(name=name, url=url) for name, url in PUBLISHED.urls.items()])


NO_NEWS: Any = SimpleNamespace()

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
        release = make_release(make_pool(), peers, timeout_s=30)
        await release(REPORT)
        await release(None)
        return True

    async def follow(peers: RankPeers) -> bool:
        served: list[PublishReport] = []
        told: list[Published] = []
        given: list[int] = []

        async def give(version: int, _folder: object, *, canary: tuple[int, ...]) -> None:
            assert canary == (1, 2)
            given.append(version)

        publisher = FollowingPublisher(
            trainers=SimpleNamespace(write_weights=give), peers=peers, canary=(1, 2), timeout_s=10.0,
            followed=SimpleNamespace(follow=told.append))
        for version in (3, 4):
            await publisher.publish(version, on_served=served.append)
        await publisher.settle()
        return served == [REPORT] and told == [PUBLISHED] and given == [3, 4]

    return asyncio.run(body())


@pytest.fixture(scope="module")
def heard() -> list:
    """Of both ranks."""
    return run_ranks(talk_and_publish, world=2)


def test_everyone_gets_what_the_leader_gave_and_what_all_gave(heard: list) -> None:
    assert [talked for talked, _ in heard] == [[[0, 7], ["rank 0", "rank 1"]]] * 2


def test_all_ranks_learn_how_weights_were_served_or_go_on_before_they_are(heard: list) -> None:
    assert [went_on for _, went_on in heard] == [True, True]


def test_a_rank_that_rolls_out_lets_only_the_engines_serve_that_rank_0_proved() -> None:
    pool = make_pool()
    followed = Followed(pool, InferenceConfig(), news=NO_NEWS)
    followed.follow(PUBLISHED)
    assert set(pool.healthy) == {"engine 1"}
    healed = replace(REPORT, version=4, serving=("engine 0", "engine 1"), quarantined={})
    followed.follow(replace(PUBLISHED, report=healed))
    assert set(pool.healthy) == {"engine 0", "engine 1"}
    assert pool.client("engine 0").url == "http://127.0.0.1:9000"


def test_an_engine_that_rank_0_started_anew_is_routed_to_where_it_is_even_if_nobody_missed_it() -> None:
    pool = make_pool()
    followed = Followed(pool, InferenceConfig(), news=NO_NEWS)
    followed.follow(replace(PUBLISHED, report=replace(REPORT, serving=tuple(PUBLISHED.urls), quarantined={})))
    moved = PUBLISHED.urls | {"engine 1": "http://127.0.0.1:9999"}
    followed.follow(Published(replace(REPORT, version=4, serving=tuple(PUBLISHED.urls), quarantined={}), moved))
    assert set(pool.healthy) == set(PUBLISHED.urls)
    assert pool.client("engine 1").url == "http://127.0.0.1:9999"


@dataclass
class Client:
    """An engine that is well where it lives."""

    url: str
    lives: dict[str, int]
    name: str = "engine 0"

    async def health(self, *, timeout_s: float) -> dict[str, int]:
        if self.url not in self.lives:
            raise EngineError(f"{self.name} cannot be reached")
        return {"version": self.lives[self.url]}


def test_a_rank_goes_to_where_an_engine_was_started_anew_before_the_next_publish() -> None:
    """Rank 0 restarts it and proves it later; the other rank is told through a real store, and waits for the proof."""
    old, new = "http://127.0.0.1:9000", "http://127.0.0.1:9001"

    async def body() -> None:
        store = host_store(60)
        leads, follows = (Notice(connect_store("127.0.0.1", store.port, timeout_s=60), "engines") for _ in range(2))
        lives = {old: 3}
        clients = Client(old, lives), Client(old, lives)
        leader, follower = (EnginePool([client]) for client in clients)
        config = InferenceConfig(probe_interval_s=0.05, probe_timeout_s=0.5)
        followed = Followed(follower, config, news=EngineNews(follows))
        followed.follow(Published(replace(REPORT, serving=("engine 0",), quarantined={}), {"engine 0": old}))
        async with beside(EngineNews(leads).watch(leader), followed.watch()):
            await asyncio.sleep(0.1)
            lives.clear()
            await until(lambda: follower.states["engine 0"].value == "healing")
            lives[new] = -1
            leader.quarantine("engine 0", "its process died")
            leader.mark_healing("engine 0", url=new)
            await until(lambda: clients[1].url == new)
            await asyncio.sleep(0.2)
            assert follower.states["engine 0"].value == "healing", "it serves no version that is published"
            lives[new] = 3
            await asyncio.sleep(0.4)
            assert follower.states["engine 0"].value == "healing", "it says that it serves the version, and rank 0 has not seen the proof"
            leader.restore("engine 0", 3)
            await until(lambda: set(follower.healthy) == {"engine 0"})
        for notice in (leads, follows):
            notice.close()

    asyncio.run(body())


def test_an_engine_that_rank_0_has_refused_serves_no_other_rank_however_well_it_says_it_is() -> None:
    url = PUBLISHED.urls["engine 0"]

    async def body() -> None:
        store = host_store(60)
        leads, follows = (Notice(connect_store("127.0.0.1", store.port, timeout_s=60), "engines") for _ in range(2))
        lives = {url: 3}
        leader, follower = (EnginePool([Client(url, lives)]) for _ in range(2))
        leader.admit("engine 0", 2)
        followed = Followed(follower, InferenceConfig(probe_interval_s=0.05, probe_timeout_s=0.5), news=EngineNews(follows))
        async with beside(EngineNews(leads).watch(leader), followed.watch()):
            followed.follow(Published(replace(REPORT, serving=(), quarantined={"engine 0": "its canary is off"}), {"engine 0": url}))
            leader.quarantine("engine 0", "its canary is off")
            await asyncio.sleep(0.6)
            assert not follower.healthy
            leader.mark_healing("engine 0")
            leader.restore("engine 0", 3)
            await until(lambda: set(follower.healthy) == {"engine 0"})
        for notice in (leads, follows):
            notice.close()

    asyncio.run(body())
