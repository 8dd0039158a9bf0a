"""Publishing to many engines: seconds until all serve a version, for 256 engines and for 4, and what one slow engine costs the others.

Engines are paths of two servers in processes of their own. Each takes as long for a version as a real one that loads a model of some
gigabytes: 3 s to stage it, 50 ms to switch and 50 ms to prove it, with the fingerprint that is published; nothing else of an engine is
there. Clients, pool and `WeightsPublisher` are those of a run, over real HTTP. The controller's CPU time is told as well, against the
fifth of the seconds for 4 that 256 may take longer: on a machine with other work, wall-clock time is mostly waiting for a core.

A second pair has one engine among 64 that takes five times as long. "Together" is the order of earlier releases: all engines switch when
the last has staged, and prove with two requests. What is compared is the time until 63 of the 64 serve the version, and for how long an
engine has the version without serving it, on average.

    python benchmarks/publish_fleet.py [--quick] [--engines 256] [--repeats 3]

Prints one JSON line for each comparison.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from measure import emit, note
from stand_ins import StandIn, http, path_of, serve, servers

from offbeat.config.weights import WeightsConfig
from offbeat.fleet.members import State
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.publication import PublishReport
from offbeat.fleet.publishers import WeightsPublisher
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.weights.proof import ProofJudge
from offbeat.weights.protocol import Manifest

FEW = 4
NUM_BESIDE_SLOW = 64
SLOWER = 5
CANARY = tuple(range(64))
LOGPROBS = tuple(-0.01 * token for token in range(1, 64))
AIM_OF_MANY = 1 / 1.2
TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=256, help="of the larger fleet (default: 256)")
    parser.add_argument("--repeats", type=int, default=3, help="publishes of each kind; the median counts (default: 3)")
    parser.add_argument("--stage-s", type=float, default=3.0, help="seconds in which an engine stages a version (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 16 engines, one publish of 0.3 s")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.engines, options.repeats, options.stage_s = 16, 1, 0.3
    if options.serve:
        versions: dict[str, int] = {}
        asyncio.run(serve(lambda: PacedStandIn(options.stage_s, versions)))
    else:
        asyncio.run(measure(options))


# -- engines -------------------------------------------------------------------------------------------------------------------------------


class PacedStandIn(StandIn):
    """It answers after the time that a real engine would take."""

    def __init__(self, stage_s: float, versions: dict[str, int]) -> None:
        super().__init__()
        self._stage_s = stage_s
        self._versions = versions
        self._answering: set[asyncio.Task[None]] = set()

    def answer(self, head: bytes, body: bytes) -> None:
        task = asyncio.create_task(self._answer(path_of(head), body))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, path: str, body: bytes) -> None:
        _, engine, _, _, what = path.split("/")
        asked, answer = json.loads(body or b"{}"), {}
        if what == "stage":
            await asyncio.sleep(self._stage_s * (SLOWER if engine == "slow" else 1))
        elif what == "switch":
            await asyncio.sleep(0.05)
            self._versions[engine] = asked["version"]
        else:
            await asyncio.sleep(0.05)
            version = self._versions[engine]
            answer = {"version": version, "fingerprint": f"of {version}", "logprobs": LOGPROBS}
        self.transport.write(http(json.dumps(answer).encode()))


# -- publishes -----------------------------------------------------------------------------------------------------------------------------


class Written:
    """A channel whose versions are there already."""

    async def write(self, version: int, *, num_receivers: int = 0) -> Manifest:  # noqa: ARG002
        return Manifest(version, f"v{version}", f"of {version}", CANARY, LOGPROBS)

    async def rewrite(self, manifest: Manifest) -> Manifest | None:  # noqa: ARG002
        return None

    def prune(self, served: int) -> None:
        pass


@dataclass
class Times:
    """When each engine had staged a version, and when it served it: seconds since the publish began."""

    start_s: float = field(default_factory=time.perf_counter)
    staged: dict[str, float] = field(default_factory=dict)
    serving: dict[str, float] = field(default_factory=dict)

    def now(self) -> float:
        return time.perf_counter() - self.start_s

    @property
    def mean_wait_s(self) -> float:
        """Mean seconds for which an engine had the version and did not serve it."""
        return statistics.mean(self.serving[name] - at for name, at in self.staged.items())


class Timed(EngineClient):
    """Notes when it has staged a version."""

    times: Times

    async def stage(self, manifest: Manifest, *, timeout_s: float) -> None:
        await super().stage(manifest, timeout_s=timeout_s)
        self.times.staged[self.name] = self.times.now()


class TimedPool(EnginePool):
    """Notes when engines serve."""

    times: Times

    def admit(self, name: str, version: int) -> None:
        super().admit(name, version)
        self.times.serving[name] = self.times.now()


@dataclass
class Served:
    """Engines in service, to which versions are published."""

    pool: TimedPool
    clients: Mapping[str, Timed]
    publisher: WeightsPublisher
    version: int = 0

    def begin(self) -> Times:
        self.version += 1
        times = self.pool.times = Times()
        for client in self.clients.values():
            client.times = times
        return times

    async def publish(self) -> Times:
        """As a run does it."""
        times, reports = self.begin(), list[PublishReport]()
        await self.publisher.publish(self.version, on_served=reports.append)
        await self.publisher.settle()
        assert len(reports[0].serving) == len(self.clients), f"an engine is missing: {reports[0].quarantined}"
        return times

    async def publish_together(self) -> Times:
        """As earlier releases did it."""
        times = self.begin()
        manifest = await Written().write(self.version)
        await asyncio.gather(*(client.stage(manifest, timeout_s=TIMEOUT_S) for client in self.clients.values()))

        async def switch(client: Timed) -> None:
            await client.switch(manifest, interrupt="recompute", timeout_s=TIMEOUT_S)
            for _ in range(2):
                await client.prove(CANARY, timeout_s=TIMEOUT_S)
            self.pool.admit(client.name, manifest.version)

        await asyncio.gather(*(switch(client) for client in self.clients.values()))
        return times


@asynccontextmanager
async def serving(urls: Sequence[str], num_engines: int, *, slow: bool = False) -> AsyncIterator[Served]:
    names = [*(["slow"] if slow else []), *(f"e{number}" for number in range(num_engines - slow))]
    async with EngineSession() as http:
        clients = {name: Timed(name, f"{urls[i % len(urls)]}/{name}", http.session) for i, name in enumerate(names)}
        pool = TimedPool(clients.values())
        publisher = WeightsPublisher(
            pool, Written(), WeightsConfig(stage_timeout_s=TIMEOUT_S), judge=ProofJudge(tolerance=1e-3))  # pyright: ignore[reportArgumentType]
        async with publisher:
            yield Served(pool, clients, publisher)
            assert all(member.state is State.SERVING for member in pool.members.values())


async def measure(options: argparse.Namespace) -> None:
    with servers(__file__, ["--stage-s", str(options.stage_s)]) as urls:
        async with serving(urls, options.engines) as many, serving(urls, FEW) as few:
            seconds: dict[str, list[float]] = {"many": [], "few": []}
            cpu_s: list[float] = []
            for number in range(options.repeats + 1):
                for name, fleet in (("many", many), ("few", few)):
                    start_s = time.process_time()
                    times = await fleet.publish()
                    if number:  # the first is the warm-up
                        cpu_s += [time.process_time() - start_s] if fleet is many else []
                        seconds[name].append(max(times.serving.values()))
                        note(f"{len(fleet.clients)} engines: {seconds[name][-1]:.2f} s")
            emit("publish_fleet", f"publish to {options.engines} engines vs {FEW}", ours=statistics.median(seconds["many"]),
                 peer=statistics.median(seconds["few"]), unit="s", aim=AIM_OF_MANY, less_is_better=True)
            emit("publish_fleet", f"the controller's CPU for {options.engines} engines vs a fifth of the seconds for {FEW}",
                 ours=statistics.median(cpu_s), peer=statistics.median(seconds["few"]) / 5, unit="s", aim=1.0, less_is_better=True)
        async with serving(urls, NUM_BESIDE_SLOW, slow=True) as fleet:
            own, together = [await fleet.publish() for _ in range(options.repeats)], []
            for _ in range(options.repeats):
                together.append(await fleet.publish_together())
            beside = f"{NUM_BESIDE_SLOW - 1} engines beside one that is {SLOWER} times as slow, each at its own pace vs together"
            nearly_all = [sorted(times.serving.values())[-2] for times in (*own, *together)]
            emit("publish_fleet", f"publish to {beside}", ours=statistics.median(nearly_all[: len(own)]),
                 peer=statistics.median(nearly_all[len(own) :]), unit="s", less_is_better=True)
            emit("publish_fleet", f"staged and not serving, {beside}", ours=statistics.mean(times.mean_wait_s for times in own),
                 peer=statistics.mean(times.mean_wait_s for times in together), unit="s", less_is_better=True)


if __name__ == "__main__":
    main()
