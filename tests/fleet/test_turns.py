"""Engines sleep while it is the ranks' turn, whatever becomes of them meanwhile, and go on afterwards."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from offbeat.aio import HaltingClock
from offbeat.errors import DeadlineError, EngineError
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.health import Healer
from offbeat.fleet.members import State
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.turns import EngineTurns
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import Sampling
from offbeat.telemetry.record import SilentRecord
from offbeat.weights.protocol import Manifest
from waiting import until

PROMPT = (13, 14, 15)
CANARY = (13, 14, 15, 5, 6, 7, 0)


class Publisher:
    """Everything that it has published is served."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    async def settle(self, *, behind: int = 0) -> None:
        assert behind == 0
        self._calls.append("settled")


class Processes:
    """Processes of engines, which have nothing to do but to end."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    async def end_process(self, name: str) -> None:
        self._calls.append(f"{name} is ended")


class Engine:
    """An engine that does as it is told.

    Attributes:
        fails: by the name of a call, what it raises.
    """

    def __init__(self, name: str, calls: list[str], **fails: Exception) -> None:
        self.name = name
        self.url = ""
        self.fails = fails
        self._calls = calls

    async def _call(self, what: str) -> dict[str, object]:
        self._calls.append(f"{self.name} {what}")
        if what in self.fails:
            raise self.fails[what]
        return {}

    async def sleep(self, *, keep_weights: bool, timeout_s: float) -> None:
        assert timeout_s == 5.0
        await self._call("sleeps, weights kept" if keep_weights else "sleeps")

    async def wake(self, *, timeout_s: float) -> None:
        assert timeout_s == 5.0
        await self._call("wakes")

    async def health(self, *, timeout_s: float) -> dict[str, object]:
        assert timeout_s > 0
        return await self._call("is probed")


def taking_turns(
    engines: list[Engine], root: Path, body: Callable[[EnginePool, EngineTurns], Awaitable[None]], *, keep_weights: bool = False,
    calls: list[str], restart: Callable[[str], Awaitable[str]] | None = None,
) -> None:
    """Run `body` with engines that have proven version 0, beside what heals them if there is a `restart`."""

    async def reload(_client: EngineClient) -> int:
        return 1

    async def main() -> None:
        pool = EnginePool(engines)  # type: ignore[arg-type]
        for engine in engines:
            pool.admit(engine.name, 0)
        healer = Healer(pool, reload=reload, restart=restart, probe_interval_s=60, probe_timeout_s=1)
        task = asyncio.create_task(healer.run() if restart is not None else asyncio.Event().wait())
        await body(pool, EngineTurns(pool, SilentRecord(root), engines=Processes(calls), keep_weights=keep_weights, timeout_s=5.0))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_engines_fall_asleep_once_they_serve_what_was_published_and_nobody_is_told_twice(tmp_path: Path) -> None:
    calls: list[str] = []

    async def body(pool: EnginePool, turns: EngineTurns) -> None:
        await turns.to_engines()
        assert turns.take_metrics() == {} and calls == []
        for _ in range(2):
            await turns.to_ranks(Publisher(calls))
        assert calls == ["settled", "a sleeps", "b sleeps"] and pool.clock.halted
        assert list(turns.take_metrics()) == ["turns/to_ranks_s"]
        for _ in range(2):
            await turns.to_engines()
        assert calls[3:] == [] and not pool.clock.halted, "the weights that are published wake them"
        assert list(turns.take_metrics()) == ["turns/asleep_s"]
        await turns.to_ranks(Publisher(calls))
        assert calls[3:] == ["settled", "a sleeps", "b sleeps"]

    taking_turns([Engine("a", calls), Engine("b", calls)], tmp_path, body, calls=calls)


def test_engines_that_keep_their_weights_are_woken_and_one_that_does_not_wake_is_quarantined(tmp_path: Path) -> None:
    calls: list[str] = []
    broken = Engine("b", calls, wakes=DeadlineError("waiting for wake on b passed its deadline of 5 s (waited 5.0 s)"))

    async def body(pool: EnginePool, turns: EngineTurns) -> None:
        await turns.to_ranks(Publisher([]))
        await turns.to_engines()
        assert calls == ["a sleeps, weights kept", "b sleeps, weights kept", "a wakes", "b wakes"]
        assert pool.states == {"a": State.SERVING, "b": State.QUARANTINED}
        assert pool.members["b"].reason == "it did not wake: waiting for wake on b passed its deadline of 5 s (waited 5.0 s)"

    taking_turns([Engine("a", calls), broken], tmp_path, body, keep_weights=True, calls=calls)


def test_an_engine_that_does_not_fall_asleep_ends_and_is_healed_when_it_is_the_engines_turn_again(tmp_path: Path) -> None:
    calls: list[str] = []
    engine = Engine("a", calls, sleeps=EngineError("a answered /v1/weights/sleep with 500: out of luck"))

    async def restart(name: str) -> str:
        calls.append(f"{name} is restarted")
        engine.fails.clear()
        return ""

    async def body(pool: EnginePool, turns: EngineTurns) -> None:
        await turns.to_ranks(Publisher([]))
        assert pool.members["a"].reason == "it did not fall asleep: a answered /v1/weights/sleep with 500: out of luck"
        engine.fails["is probed"] = EngineError("it is gone")
        await until(lambda: pool.states["a"] is State.HEALING)
        assert calls == ["a sleeps", "a is ended"], "nothing is started beside the ranks"
        await turns.to_engines()
        await until(lambda: pool.states["a"] is State.SERVING)
        assert calls[2:] == ["a is probed", "a is restarted", "a is probed"]
        await turns.to_ranks(Publisher([]))
        assert calls[5:] == ["a sleeps"]

    taking_turns([engine], tmp_path, body, calls=calls, restart=restart)


def test_an_engine_that_dies_asleep_or_is_out_of_service_is_healed_in_the_engines_turn(tmp_path: Path) -> None:
    calls: list[str] = []
    engines = [Engine("a", calls), Engine("b", calls)]

    async def restart(name: str) -> str:
        raise AssertionError(f"{name} is well")

    async def body(pool: EnginePool, turns: EngineTurns) -> None:
        pool.quarantine("b", "it is ill")  # nobody has begun to heal it
        await turns.to_ranks(Publisher([]))
        pool.quarantine("a", "its process died")
        await until(lambda: set(pool.states.values()) == {State.HEALING})
        assert calls == ["b is ended", "a sleeps"] or calls == ["a sleeps", "b is ended"]
        await turns.to_engines()
        await until(lambda: set(pool.states.values()) == {State.SERVING})

    taking_turns(engines, tmp_path, body, calls=calls, restart=restart)


def test_requests_wait_in_a_sleeping_engine_however_long_and_go_on_with_the_next_version(start_engine, tmp_path: Path) -> None:
    server, url = start_engine()

    async def main() -> None:
        async with EngineSession() as http:
            clock = HaltingClock()
            pool = EnginePool([EngineClient("a", url, http.session, clock=clock)], clock=clock)
            pool.admit("a", 0)
            turns = EngineTurns(pool, SilentRecord(tmp_path), engines=Processes([]), keep_weights=False, timeout_s=5.0)
            dispatcher = Dispatcher(pool, request_timeout_s=3.0)
            server._loop.pause("keep").result()
            calls = [asyncio.create_task(dispatcher.generate(PROMPT, Sampling(8, ignore_eos=True), n=2))]
            await until(lambda: server._engine.num_waiting)
            await turns.to_ranks(Publisher([]))
            server._loop.call(server._engine.resume).result()
            calls.append(asyncio.create_task(dispatcher.generate(PROMPT, Sampling(8, ignore_eos=True), n=2)))
            await until(lambda: server._engine.num_waiting == 2)
            done, _ = await asyncio.wait(calls, timeout=3.5)
            assert not done, "the time of a turn does not count"
            await turns.to_engines()
            manifest = Manifest(1, server._options.model, "", CANARY, ())
            await pool.client("a").stage(manifest, timeout_s=20)
            await pool.client("a").switch(manifest, interrupt="recompute", timeout_s=20)
            pool.admit("a", 1)
            for samples in await asyncio.gather(*calls):
                assert [set(sample.versions) for sample in samples] == [{1}, {1}]

    asyncio.run(main())
