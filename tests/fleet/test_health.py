"""Engines that die, stop or lie are noticed, healed and back in service; requests that they had are done all the same."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import pairwise

import aiohttp
import pytest

from offbeat.config.weights import WeightsConfig
from offbeat.errors import EngineError, WorkerError
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.health import Healer
from offbeat.fleet.listener import FleetListener
from offbeat.fleet.members import State
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.publication import PublishReport
from offbeat.fleet.publishers import WeightsPublisher
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import Sampling
from offbeat.weights.proof import ProofJudge
from offbeat.weights.protocol import Manifest
from small_run import build_small_model
from waiting import until

PROMPT = (13, 14, 15)
CANARY = (13, 14, 15, 5, 6, 7, 0)
INTERVAL_S = 0.05
PATIENT_S = 40.0
"""Deadline of probes where nobody hangs: an engine may be slow because the machine is busy."""
HANGS_S = 4.0
"""Where somebody does."""

# Answers everything with {}: what a probe asks, without the seconds that an engine takes to start.
ANSWERER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *_):
        print("asked", flush=True)
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Events(list, FleetListener):
    def event(self, kind: str, **fields: object) -> None:
        self.append({"kind": kind} | fields)

    def quarantined(self, engine: str, reason: str) -> None:
        self.event("quarantine", engine=engine, reason=reason)

    def steps(self) -> list[tuple[object, bool]]:
        return [(event["by"], not event["reason"]) for event in self if event["kind"] == "heal_attempt"]


def caring(
    urls: dict[str, str], body: Callable[[EnginePool, Events], Awaitable[None]], *,
    reload: Callable[[EngineClient], Awaitable[int | None]] | None = None, restart: Callable[[str], Awaitable[str]] | None = None,
    make_reload: Callable[[EnginePool], Callable[[EngineClient], Awaitable[int | None]]] | None = None, min_engines: int = 1,
    probe_timeout_s: float = PATIENT_S,
) -> None:
    """Run `body` beside a healer of engines at these URLs, all admitted at version 0."""
    async def ready(_: EngineClient) -> int:
        return 0

    async def main() -> None:
        async with EngineSession() as http:
            events = Events()
            pool = EnginePool(
                [EngineClient(name, url, http.session) for name, url in urls.items()], probe_timeout_s=probe_timeout_s,
                heal_timeout_s=60, min_engines=min_engines, listener=events)
            for name in urls:
                pool.admit(name, 0)
            healer = Healer(
                pool, reload=make_reload(pool) if make_reload else reload or ready, restart=restart, probe_interval_s=INTERVAL_S,
                probe_timeout_s=probe_timeout_s, listener=events)
            task = asyncio.create_task(healer.run())
            await body(pool, events)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_an_engine_that_dies_is_restarted_and_its_request_is_done(start_engine) -> None:
    server, url = start_engine()

    async def restart(name: str) -> str:
        assert name == "a"
        return start_engine()[1]

    async def body(pool: EnginePool, events: Events) -> None:
        server._loop.pause("keep").result()
        call = asyncio.create_task(Dispatcher(pool, request_timeout_s=60).generate(PROMPT, Sampling(3), n=1))
        await until(lambda: server._engine.num_waiting + server._engine.num_running)
        await asyncio.to_thread(server.stop)
        assert [sample.num_retries for sample in await call] == [1]
        assert pool.states == {"a": State.SERVING}
        assert events.steps() == [("reload", False), ("restart", True), ("reload", True)]
        assert events[0]["kind"] == "quarantine"
        assert events[-1]["kind"] == "healed" and events[-1]["attempts"] == 1 and events[-1]["seconds"] > 0
        assert len(await Dispatcher(pool, request_timeout_s=60).generate(PROMPT, Sampling(3), n=1)) == 1

    caring({"a": url}, body, restart=restart)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_an_engine_that_somebody_pauses_is_noticed_and_resumed_and_its_request_is_done(start_engine, mode: str) -> None:
    server, url = start_engine()

    async def body(pool: EnginePool, events: Events) -> None:
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{url}/pause", json={"mode": mode, "by": "an old controller"}) as response:
                assert response.status == 200
        sample, = await Dispatcher(pool, request_timeout_s=60).generate(PROMPT, Sampling(3), n=1)
        assert sample.finish_reason in ("stop", "length")
        await until(lambda: pool.states["a"] is State.SERVING and events[-1]["kind"] == "healed")
        assert events[0]["kind"] == "quarantine"
        assert re.fullmatch(r"it was paused by an old controller, \d+ s ago, and not by this run", events[0]["reason"])
        assert events.steps() == [("reload", True)]
        assert not server._engine.paused

    caring({"a": url}, body)


def test_samples_that_a_pause_has_cut_short_are_drawn_again(start_engine) -> None:
    server, url = start_engine()

    async def body(pool: EnginePool, _: Events) -> None:
        server._loop.pause("keep").result()
        call = asyncio.create_task(Dispatcher(pool, request_timeout_s=60).generate(PROMPT, Sampling(3, ignore_eos=True), n=1))
        await until(lambda: server._engine.num_waiting + server._engine.num_running)
        async with aiohttp.ClientSession() as http, http.post(f"{url}/pause", json={"mode": "abort"}) as response:
            assert response.status == 200
        (sample,) = await call
        assert len(sample.token_ids) == 3 and sample.num_retries == 1

    caring({"a": url}, body)


def test_an_idle_engine_that_stops_is_noticed_in_time_and_returns_by_itself() -> None:
    with subprocess.Popen([sys.executable, "-c", ANSWERER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{process.stdout.readline().strip()}"

            async def body(pool: EnginePool, events: Events) -> None:
                for _ in range(4):
                    assert await asyncio.to_thread(process.stdout.readline) == "asked\n"
                assert not events  # it is well
                process.send_signal(signal.SIGSTOP)
                start = time.monotonic()
                await pool.wait_quarantined("a")
                assert time.monotonic() - start < INTERVAL_S + HANGS_S + 15.0  # the last for a busy machine
                assert "passed its deadline" in events[0]["reason"]
                await until(events.steps)
                process.send_signal(signal.SIGCONT)
                await until(lambda: pool.states["a"] is State.SERVING)
                assert events.steps()[-1] == ("reload", True)
                assert set(events.steps()[:-1]) == {("reload", False)}

            caring({"a": url}, body, probe_timeout_s=HANGS_S)
        finally:
            process.kill()


def test_healing_is_tried_again_and_again_with_growing_pauses(start_engine) -> None:
    _, url = start_engine()
    starts: list[float] = []

    async def reload(_: EngineClient) -> int:
        starts.append(time.monotonic())
        if len(starts) < 6:
            raise EngineError("a proved the wrong weights")
        if len(starts) == 6:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))  # as on NFS
        return 0

    async def restart(name: str) -> str:
        if len(starts) < 5:
            raise WorkerError(f"{name} could not be started")
        return url

    async def body(pool: EnginePool, events: Events) -> None:
        pool.quarantine("a", "its canary is off")
        await until(lambda: pool.states["a"] is State.SERVING)
        assert events.steps() == [
            *[("reload", False), ("restart", False)] * 4, ("reload", False), ("restart", True), ("reload", False), ("reload", True)]
        assert {event["reason"] for event in events if event.get("by") == "reload"} == {
            "a proved the wrong weights", "OSError: [Errno 116] Stale file handle", ""}
        assert all(after - before >= INTERVAL_S * 2**i for i, (before, after) in enumerate(pairwise(starts[:5])))

    caring({"a": url}, body, reload=reload, restart=restart)


def test_one_engine_that_cannot_be_healed_does_not_keep_another_from_it(start_engine) -> None:
    (_, url_a), (_, url_b) = start_engine(), start_engine()

    async def reload(client: EngineClient) -> None:
        if client.name == "a":
            await asyncio.sleep(60)

    async def body(pool: EnginePool, _: Events) -> None:
        pool.quarantine("a", "its canary is off")
        pool.quarantine("b", "its canary is off")
        await until(lambda: pool.states == {"a": State.HEALING, "b": State.UNPROVEN})  # nothing was published

    caring({"a": url_a, "b": url_b}, body, reload=reload)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_small_model(tmp_path_factory.mktemp("newer"), seed=2)


class Channel:
    """Versions that all have the weights of one folder, which an engine at `reference` serves."""

    def __init__(self, folder: str, reference: str) -> None:
        self._folder = folder
        self._reference = reference

    async def write(self, version: int, *, num_receivers: int = 0) -> Manifest:
        async with EngineSession() as http:
            proof = await EngineClient("reference", self._reference, http.session).prove(CANARY, timeout_s=20)
        assert proof.fingerprint is not None
        return Manifest(version, self._folder, proof.fingerprint, CANARY, proof.canary_logprobs)

    async def rewrite(self, manifest: Manifest) -> Manifest | None:
        return None

    def prune(self, served: int) -> None:
        pass


async def published(publisher: WeightsPublisher, version: int) -> PublishReport:
    """How publishing a version went, once engines serve it."""
    reports: list[PublishReport] = []
    await publisher.publish(version, on_served=reports.append)
    await publisher.settle()
    return reports[0]


def test_a_publish_waits_no_longer_for_an_engine_that_hangs_than_its_probe(start_engine, newer) -> None:
    (_, url), (_, reference) = start_engine(), start_engine(model=newer)

    async def reload(client: EngineClient) -> None:
        raise EngineError(f"{client.name} hangs still")

    async def body(pool: EnginePool, _: Events) -> None:
        async with await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0) as silent:
            pool.client("b").url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
            publisher = WeightsPublisher(pool, Channel(newer, reference), WeightsConfig(), judge=ProofJudge(tolerance=1e-3))
            report = await asyncio.wait_for(published(publisher, 5), 50)  # the deadline of staging is 60 s
            assert report.serving == ("a",)
            assert "b was quarantined while it answered: waiting for health on b" in report.quarantined["b"]

    caring({"a": url, "b": url}, body, reload=reload, probe_timeout_s=HANGS_S)


def test_engines_that_a_publish_loses_heal_to_its_version_and_it_goes_on(start_engine, newer) -> None:
    (_, url_a), (lying, url_b), (_, reference) = start_engine(), start_engine(), start_engine(model=newer)
    lying._engine._forward.install = lambda prepared: None  # it takes a switch, says so, and goes on with the old weights
    publishers: list[WeightsPublisher] = []

    def make_reload(pool: EnginePool) -> Callable[[EngineClient], Awaitable[int | None]]:
        publishers.append(WeightsPublisher(pool, Channel(newer, reference), WeightsConfig(), judge=ProofJudge(tolerance=1e-3)))
        return publishers[0].bring

    async def restart(name: str) -> str:
        assert name == "b"
        return start_engine(version=-1)[1]

    async def body(pool: EnginePool, events: Events) -> None:
        dispatcher = Dispatcher(pool, request_timeout_s=60)
        report = await published(publishers[0], 5)
        assert list(report.quarantined) == ["b"] and sorted(report.serving) == ["a", "b"]
        assert "fingerprint" in report.quarantined["b"]
        assert events.steps() == [("reload", False), ("restart", True), ("reload", True)]
        samples = await asyncio.gather(*(dispatcher.generate(PROMPT, Sampling(3), n=1) for _ in range(4)))
        assert {version for (sample,) in samples for version in sample.versions} == {5}
        pool.quarantine("b", "by hand")  # heals beside the next publish
        assert sorted((await published(publishers[0], 6)).serving) == ["a", "b"]
        samples = await asyncio.gather(*(dispatcher.generate(PROMPT, Sampling(3), n=1) for _ in range(4)))
        assert {version for (sample,) in samples for version in sample.versions} == {6}

    caring({"a": url_a, "b": url_b}, body, make_reload=make_reload, restart=restart, min_engines=2)
