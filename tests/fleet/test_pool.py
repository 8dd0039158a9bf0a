"""The standing of engines: who is in service, by whose word, and waits for enough of them."""

import asyncio

import pytest

from heard import Heard
from offbeat.errors import DeadlineError, EngineError
from offbeat.fleet.members import State
from offbeat.fleet.pool import EnginePool
from offbeat.inference.client import EngineClient, EngineSession


class Engine:
    """An engine of which only the name and the place matter."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = f"http://{name}"


def test_a_quarantine_keeps_its_first_reason_and_ends_with_a_restoration_alone() -> None:
    pool = EnginePool([Engine("a"), Engine("b")], listener=(heard := Heard()))
    pool.admit("a", 3)
    assert pool.states == {"a": State.SERVING, "b": State.UNPROVEN} and list(pool.healthy) == ["a", "b"]
    pool.quarantine("a", "its canary is off")
    pool.quarantine("a", "it is late, too")
    pool.admit("a", 4)  # a late proof of a publish
    assert heard.quarantines == {"a": "its canary is off"} and list(pool.healthy) == ["b"]
    pool.mark_healing("a", url="http://elsewhere/")
    assert pool.client("a").url == "http://elsewhere"
    pool.restore("a", 5)
    assert pool.states["a"] is State.SERVING and pool.members["a"].version == 5


def test_who_waits_for_a_version_gets_the_engines_that_serve_it_once_they_are_enough() -> None:
    async def main() -> None:
        pool = EnginePool([Engine(name) for name in "abc"], min_engines=2, heal_timeout_s=60.0)
        waiting = asyncio.create_task(pool.wait_healthy(version=7))
        for name, version in (("a", 7), ("b", 6), ("c", 7)):
            assert not (await asyncio.wait([waiting], timeout=0.01))[0]
            pool.admit(name, version)
        assert list(await waiting) == ["a", "c"]

    asyncio.run(main())


class LateEngine(Engine):
    """Misses the deadline of its first probes."""

    def __init__(self, *, misses: int) -> None:
        super().__init__("a")
        self.misses = misses
        self.given_s: list[float] = []

    async def health(self, *, timeout_s: float) -> dict[str, object]:
        self.given_s.append(timeout_s)
        if len(self.given_s) <= self.misses:
            raise DeadlineError(f"health of a passed its deadline of {timeout_s:g} s")
        return {}


class Processes:
    """Processes that compute between any two looks."""

    def __init__(self, *, computed_s: float) -> None:
        self.step_s, self.now_s = computed_s, 0.0

    def cpu_s(self, name: str) -> float:
        assert name == "a"
        self.now_s += self.step_s
        return self.now_s


@pytest.mark.parametrize(("misses", "computed_s", "given_s"), [
    (0, 9.0, [5.0]), (1, 9.0, [5.0, 15.0]), (2, 9.0, [5.0, 15.0]), (1, 0.04, [5.0]), (1, 0.0, [5.0])])
def test_a_late_engine_is_asked_again_while_it_computes(misses: int, computed_s: float, given_s: list[float]) -> None:
    async def main() -> None:
        engine = LateEngine(misses=misses)
        pool = EnginePool([engine], listener=(heard := Heard()), processes=Processes(computed_s=computed_s))
        await pool.examine("a")
        assert engine.given_s == given_s
        assert list(heard.quarantines) == ([] if misses < len(given_s) else ["a"])

    asyncio.run(main())


def test_without_a_view_of_its_process_a_late_engine_is_out_at_once() -> None:
    pool = EnginePool([engine := LateEngine(misses=1)], listener=(heard := Heard()))
    asyncio.run(pool.examine("a"))
    assert engine.given_s == [5.0] and list(heard.quarantines) == ["a"]


def test_a_probe_tells_a_dead_engine_from_a_well_one(start_engine) -> None:
    (first, url_0), (_, url_1) = start_engine(), start_engine()
    heard = Heard()

    async def main() -> None:
        async with EngineSession() as http:
            clients = [EngineClient(f"engine {i}", url, http.session) for i, url in enumerate([url_0, url_1])]
            pool = EnginePool(clients, listener=heard)
            for name in pool.states:
                pool.admit(name, 0)
            await asyncio.to_thread(first.stop)
            for name in pool.states:
                await pool.examine(name)
                await pool.examine(name)
            assert list(heard.quarantines) == ["engine 0"] and "cannot be reached" in heard.quarantines["engine 0"]
            async with asyncio.timeout(60):
                await pool.wait_quarantined("engine 0")
            assert list(await pool.wait_healthy()) == ["engine 1"]
            with pytest.raises(EngineError, match="engine 1: serving"):
                await pool.wait_healthy(version=7)

    asyncio.run(main())
