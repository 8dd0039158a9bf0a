"""Collective work of SPMD mode's ranks besides training: the loop's peers, and publishing on every rank.

    EngineNews.watch  on rank 0; consumes time; produces notices of engines that moved; waits for the store under its deadline
    Followed.watch    on other ranks that roll out; consumes time, quarantines and notices; produces engines in service
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from offbeat.aio import SideThread
from offbeat.config.inference import InferenceConfig
from offbeat.data import wire
from offbeat.errors import DeadlineError, EngineError, PeerError, SyncError, describe
from offbeat.fleet.health import Healer
from offbeat.fleet.members import State
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.publication import PublishReport
from offbeat.fleet.publishers import OnServed, Release
from offbeat.inference.client import EngineClient
from offbeat.ranks.trainers import Trainers
from offbeat.sync.notice import Notice
from offbeat.sync.sync import Sync
from offbeat.types import Version
from offbeat.weights.protocol import Manifest

T = TypeVar("T")

_LOOK_S = 0.25
"""Interval between two looks at rank 0's engines."""

_log = logging.getLogger(__name__)


_DONE, _FAILED = b"+", b"-"
"""First byte of the leader's answer."""


@dataclass(frozen=True)
class Ready:
    """Message of one rank at `RankPeers.all_ready`; `failure` says why it could not get ready, "" if it could."""

    has_result: bool
    failure: str = ""


class RankPeers:
    """The `LoopPeers` of the ranks: named waits over the gloo group."""

    def __init__(self, sync: Sync, thread: SideThread) -> None:
        self._sync = sync
        self._thread = thread
        self._told: Exception | None = None

    async def lead(self, name: str, work: Callable[[], Awaitable[T]], kind: Any, *, timeout_s: float | None = None) -> T:
        """Let rank 0 do some work and share its result, or the reason of its failure; see `LoopPeers.lead`.

        `timeout_s` is for work that partly runs in the leader's thread, where it shows no life.
        """

        async def done() -> bytes:
            return _DONE + wire.encode(await work())

        data, error = await _attempt(done) if self._sync.rank == 0 else (None, None)
        if error is not None:
            data = _FAILED + wire.encode(describe(error))
        try:
            answer = await self._thread.run(name, partial(self._sync.broadcast, name, data, timeout_s=timeout_s))
        except SyncError:
            if error is not None:
                raise error from None  # it says more than that it could not be shared
            raise
        if answer.startswith(_FAILED):
            raise self._heard(error, rank=0, reason=wire.decode(str, answer[len(_FAILED):]))
        return wire.decode(kind, answer[len(_DONE):])

    async def gather(self, name: str, value: T) -> list[T]:
        return await self._thread.run(name, partial(self._sync.gather, name, value))

    async def meet(self, name: str) -> None:
        await self._thread.run(name, partial(self._sync.barrier, name))

    async def all_ready(self, name: str, work: Callable[[], Awaitable[T | None]]) -> T | None:
        result, error = await _attempt(work)
        own = Ready(result is not None, "" if error is None else describe(error))
        everyones = await self._thread.run(name, partial(self._sync.gather, name, own, patient=True))
        for rank, ready in enumerate(everyones):
            if ready.failure:
                raise self._heard(error, rank=rank, reason=ready.failure)
        return result if all(ready.has_result for ready in everyones) else None

    def have_heard(self, error: BaseException) -> bool:
        return self._sync.world == 1 or error is self._told

    def _heard(self, own: Exception | None, *, rank: int, reason: str) -> Exception:
        self._told = own or PeerError(f"rank {rank} failed: {reason}")
        return self._told


async def _attempt(work: Callable[[], Awaitable[T]]) -> tuple[T | None, Exception | None]:
    """Do this rank's part; returns its result, or its error, of which the others must hear whatever it is, since they wait for this rank.

    Raises:
        SyncError: the others know of it.
    """
    try:
        return await work(), None
    except SyncError:
        raise
    except Exception as exc:
        return None, exc


@dataclass(frozen=True)
class Published:
    """Result of a publish, and the current URLs of the engines by name; a restarted engine has another URL."""

    report: PublishReport
    urls: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class FollowingPublisher:
    """Publishing on a rank that does not lead: it contributes its weights, and continues when rank 0 releases it.

    Rank 0 does so when it has written the weights, or, where every rank rolls out, when engines serve them. This rank waits for as long as
    rank 0 shows life.

    Attributes:
        timeout_s: time for rank 0 to write the weights, during which it may show no life.
        followed: the engines to which this rank routes requests; None if it does not roll out.
    """

    trainers: Trainers
    peers: RankPeers
    canary: tuple[int, ...]
    timeout_s: float
    followed: "Followed | None" = None

    async def publish(self, version: Version, *, on_served: OnServed) -> None:
        """Contribute to a version and wait for rank 0; see `Publishing.publish`. Raises PeerError if rank 0 failed."""
        await self.trainers.write_weights(version, Path(), canary=self.canary)
        published = await _pass_published(self.peers, None, timeout_s=self.timeout_s)
        if published is not None:
            if self.followed is not None:
                self.followed.follow(published)
            on_served(published.report)

    async def settle(self, *, behind: int = 0) -> None:
        """Do nothing; see `Publishing.settle`. Rank 0 waits for engines, and this rank for rank 0 where it needs it."""

    async def watch(self) -> None:
        """Do nothing, for the same reason; see `Publishing.watch`."""


@dataclass(frozen=True)
class LeadingWriter:
    """Rank 0's trainers as `VersionWriter`: no version is written again, since the other ranks would have to take part."""

    trainers: Trainers
    has_trained: bool = True
    """As if: the initial weights are written like all others, because the other ranks ask for that."""

    async def write_weights(
        self, version: Version, folder: Path, *, canary: tuple[int, ...], num_receivers: int = 0, base: str = "", is_there: bool = False,
    ) -> Manifest:
        return await self.trainers.write_weights(version, folder, canary=canary, num_receivers=num_receivers, base=base, is_there=is_there)

    def holds(self, version: Version) -> bool:  # noqa: ARG002
        return False


def make_release(pool: EnginePool, peers: RankPeers, *, timeout_s: float) -> Release:
    """Return the function by which rank 0, which brings weights to the pool's engines, releases the other ranks."""

    async def release_ranks(report: PublishReport | None) -> None:
        published = report and Published(report, {name: pool.client(name).url for name in pool.states})
        await _pass_published(peers, published, timeout_s=timeout_s)

    return release_ranks


async def _pass_published(peers: RankPeers, published: Published | None, *, timeout_s: float) -> Published | None:
    """Meet at the point at which ranks leave a publish; returns rank 0's `Published`, or None."""

    async def told() -> Published | None:
        return published

    return await peers.lead("published", told, Published | None, timeout_s=timeout_s)


@dataclass(frozen=True)
class Standing:
    """An engine as rank 0 sees it; the `version` that it has proven is None while it is out of service, or before its first proof."""

    url: str
    version: Version | None


class EngineNews:
    """Rank 0's engines, for ranks that cannot wait for the next publish; shared without a sync point."""

    def __init__(self, notice: Notice) -> None:
        self._notice = notice

    async def watch(self, pool: EnginePool) -> None:
        """On rank 0: announce the URL and proven version of each engine whenever one changes, until cancelled."""
        told: dict[str, Standing] = {}
        while True:
            standings = {name: Standing(member.client.url, None if member.out else member.version) for name, member in pool.members.items()}
            if standings != told:
                try:
                    await self._notice.put_up(wire.encode_json(standings).decode())
                    told = standings
                except DeadlineError as exc:  # the next publish announces it
                    _log.warning("the other ranks cannot be told how engines are: %s", exc)
            await asyncio.sleep(_LOOK_S)

    async def standing(self, name: str) -> Standing | None:
        """On another rank: return the latest `Standing` of an engine from rank 0, or None; raises DeadlineError if the store is silent."""
        text = await self._notice.read()
        return wire.decode_json(dict[str, Standing], text.encode()).get(name) if text else None

    async def find_url(self, engine: EngineClient) -> str:
        """On another rank: return the engine's URL; raises EngineError if rank 0 told no other, DeadlineError if the store is silent."""
        standing = await self.standing(engine.name)
        if standing is None or standing.url == engine.url:
            raise EngineError(f"rank 0 has not started {engine.name} anew since its last publish; it has to heal it first")
        return standing.url


class Followed:
    """In the pool of another rank: the engines as rank 0 has published to them."""

    def __init__(self, pool: EnginePool, config: InferenceConfig, *, news: EngineNews) -> None:
        """`news` reads rank 0's announcements."""
        self._pool = pool
        self._config = config
        self._news = news
        self._version: Version | None = None

    def follow(self, published: Published) -> None:
        """Route to the engines that serve a version, at their current URLs, and to no others."""
        pool, report = self._pool, published.report
        self._version = report.version
        for name, state in pool.states.items():
            if name not in report.serving:
                pool.quarantine(name, report.quarantined.get(name, "rank 0 has taken it out of service"))
            elif state in (State.QUARANTINED, State.HEALING) or pool.client(name).url != published.urls[name]:
                pool.quarantine(name, "rank 0 has started it anew")  # even where this rank has not missed it
                pool.mark_healing(name, url=published.urls[name])
                pool.restore(name, report.version)
            else:
                pool.admit(name, report.version)

    async def watch(self) -> None:
        """Notice failing engines, and restore them at their current URLs once they have proven themselves to rank 0; until cancelled."""
        interval_s = self._config.probe_interval_s
        # Rank 0 does the healing; this rank only checks whether it is done, and may do so often.
        healer = Healer(
            self._pool, reload=self._look, restart=lambda name: self._news.find_url(self._pool.client(name)), probe_interval_s=interval_s,
            probe_timeout_s=self._config.probe_timeout_s, max_backoff_s=interval_s)
        await healer.run()

    async def _look(self, engine: EngineClient) -> Version | None:
        version = (await engine.health(timeout_s=self._config.probe_timeout_s)).get("version")
        if version != self._version:
            raise EngineError(f"{engine.name} serves version {version}, and {self._version} is published; rank 0 has to heal it first")
        standing = await self._news.standing(engine.name)
        if standing is None or standing.version != self._version or standing.url != engine.url:
            raise EngineError(f"{engine.name} has not proven version {self._version} to rank 0; rank 0 has to heal it first")
        return self._version
