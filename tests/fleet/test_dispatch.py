"""Routing over real engines: where requests go, and what happens when an engine fails, refuses, is full or is quarantined."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from heard import Heard
from offbeat.engine.server import EngineServer
from offbeat.errors import BusyError, DeadlineError, EngineError, RefusedError
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.members import State
from offbeat.fleet.pool import EnginePool
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.hearing import Hearing, KnownSample
from offbeat.inference.sampling import Sample, Sampling
from waiting import until

PROMPT = (13, 14, 15)


def using(
    urls: list[str], body: Callable[[EnginePool, Dispatcher, list[tuple[str, str]]], Awaitable[None]], *, heard: Heard | None = None,
    admit: bool = True, request_timeout_s: float = 60, token_timeout_s: float = 0, **options: Any,
) -> None:
    async def main() -> None:
        async with EngineSession() as http:
            listener = heard or Heard()
            pool = EnginePool(
                [EngineClient(f"engine {i}", url, http.session) for i, url in enumerate(urls)],
                listener=listener, **options)
            dispatcher = Dispatcher(
                pool, request_timeout_s=request_timeout_s, token_timeout_s=token_timeout_s)
            if admit:
                for name in pool.healthy:
                    pool.admit(name, 0)
            await body(pool, dispatcher, listener.failures)

    asyncio.run(main())


def pause(*servers: EngineServer) -> None:
    for server in servers:
        server._loop.pause("keep").result()


def resume(server: EngineServer) -> None:
    server._loop.call(server._engine.resume).result()


def held(server: EngineServer) -> int:
    return server._engine.num_running + server._engine.num_waiting


def test_requests_go_where_the_least_tokens_are_outstanding(start_engine) -> None:
    (first, url_0), (second, url_1) = start_engine(), start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, _: list) -> None:
        pause(first, second)
        large = asyncio.create_task(dispatcher.generate(PROMPT, Sampling(20), n=1))
        await until(lambda: held(first) == 1)
        small = [asyncio.create_task(dispatcher.generate(PROMPT, Sampling(2), n=1)) for _ in range(4)]
        await until(lambda: held(second) == 4)
        assert held(first) == 1
        fifth = asyncio.create_task(dispatcher.generate(PROMPT, Sampling(2), n=1))  # 23 tokens on the first, 4 x 5 on the second
        await until(lambda: held(second) == 5)
        last = asyncio.create_task(dispatcher.generate(PROMPT, Sampling(2), n=1))  # 23 against 25
        await until(lambda: held(first) == 2)
        resume(first)
        resume(second)
        await asyncio.gather(large, *small, fifth, last)

    using([url_0, url_1], body)


def test_a_request_of_an_engine_that_dies_is_done_by_another(start_engine) -> None:
    (first, url_0), (_, url_1) = start_engine(), start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, failures: list) -> None:
        pause(first)
        call = asyncio.create_task(dispatcher.generate(PROMPT, Sampling(4), n=2))
        await until(lambda: held(first) > 0)
        await asyncio.to_thread(first.stop)
        assert [sample.num_retries for sample in await call] == [1, 1]
        assert [name for name, _ in failures] == ["engine 0"]
        assert pool.states["engine 0"] is State.QUARANTINED  # examined at once

    using([url_0, url_1], body)


def test_when_every_engine_fails_the_reasons_are_raised(start_engine) -> None:
    (first, url_0), (second, url_1) = start_engine(), start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, failures: list) -> None:
        await asyncio.to_thread(first.stop)
        await asyncio.to_thread(second.stop)
        with pytest.raises(EngineError, match="engine 1 .* cannot be reached"):
            await dispatcher.generate(PROMPT, Sampling(4), n=1)
        assert [name for name, _ in failures] == ["engine 0", "engine 1"]

    using([url_0, url_1], body)


def test_a_request_may_be_given_up_before_it_has_failed_on_every_engine(start_engine) -> None:
    engines = [start_engine() for _ in range(3)]

    async def body(pool: EnginePool, dispatcher: Dispatcher, failures: list) -> None:
        for server, _ in engines:
            await asyncio.to_thread(server.stop)
        with pytest.raises(EngineError, match="engine 1 .* cannot be reached"):
            await dispatcher.generate(PROMPT, Sampling(4), n=1, max_failures=2)
        assert [name for name, _ in failures] == ["engine 0", "engine 1"]

    using([url for _, url in engines], body)


def test_a_wrong_request_is_not_tried_again(start_engine) -> None:
    (_, url_0), (_, url_1) = start_engine(), start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, failures: list) -> None:
        with pytest.raises(RefusedError, match="engine 0 answered"):
            await dispatcher.generate((999,), Sampling(4), n=1)
        assert failures == []

    using([url_0, url_1], body)


def test_a_full_engine_is_asked_again_later(start_engine) -> None:
    _, url = start_engine(max_running=1, max_queued=1)

    async def body(pool: EnginePool, dispatcher: Dispatcher, failures: list) -> None:
        samples = await asyncio.gather(*(dispatcher.generate(PROMPT, Sampling(2), n=1) for _ in range(8)))
        assert len(samples) == 8
        assert failures == []

    using([url], body)


def test_scores_are_routed_as_samples_are_and_tokens_are_counted(start_engine) -> None:
    (first, url_0), (_, url_1) = start_engine(), start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, failures: list) -> None:
        assert pool.outstanding == {"engine 0": 0, "engine 1": 0} and dispatcher.generated_tokens == 0
        reached, blocked = threading.Event(), threading.Event()
        first._loop.call(lambda: (reached.set(), blocked.wait(60)))
        await until(reached.is_set)
        score = asyncio.create_task(dispatcher.score(PROMPT, top_k=1, targets=((), (5,), (6, 7))))
        await until(lambda: pool.outstanding == {"engine 0": 3, "engine 1": 0})
        stopped = asyncio.create_task(asyncio.to_thread(first.stop))
        await until(lambda: first._loop._stopping)
        blocked.set()
        score = await score
        await stopped
        assert len(score.logprobs) == 3 and len(score.top[2]) == 1 and len(score.target_logprobs[2]) == 2
        assert [name for name, _ in failures] == ["engine 0"]
        samples = await dispatcher.generate(PROMPT, Sampling(5, ignore_eos=True), n=3)
        assert dispatcher.generated_tokens == 15 == sum(len(sample.token_ids) for sample in samples)
        with pytest.raises(RefusedError, match="vocabulary"):
            await dispatcher.score((999, 1))

    using([url_0, url_1], body)


@pytest.mark.parametrize("proven", [True, False])
def test_a_score_by_new_weights_waits_for_their_proof(start_engine, proven: bool) -> None:
    _, url = start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, _: list) -> None:
        pool.admit("engine 0", -1)
        score = asyncio.create_task(dispatcher.score(PROMPT))
        assert not (await asyncio.wait([score], timeout=0.2))[0]
        if proven:
            pool.admit("engine 0", 0)
            assert (await score).version == 0
        else:
            pool.quarantine("engine 0", "its weights are old")
            with pytest.raises(EngineError, match="its weights are old"):
                await score

    using([url], body)


def test_nothing_is_sent_to_an_engine_that_is_quarantined_or_unproven(start_engine) -> None:
    (first, url_0), (_, url_1) = start_engine(), start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, _: list) -> None:
        with pytest.raises(EngineError, match="no engine can serve: engine 0: has no proven version yet; engine 1: has no proven version"):
            await dispatcher.generate(PROMPT, Sampling(2), n=1)
        pool.admit("engine 0", 0)
        pool.admit("engine 1", 0)
        pool.quarantine("engine 0", "its canary is off")
        assert list(pool.healthy) == ["engine 1"]
        pause(first)  # anything sent there would hang
        await asyncio.gather(*(dispatcher.generate(PROMPT, Sampling(2), n=1) for _ in range(5)))
        assert held(first) == 0
        pool.quarantine("engine 1", "its process died")
        with pytest.raises(EngineError, match="engine 0: its canary is off; engine 1: its process died"):
            await dispatcher.generate(PROMPT, Sampling(2), n=1)

    using([url_0, url_1], body, admit=False)


def test_busy_stretches_are_told_and_cut_at_each_switch(start_engine) -> None:
    server, url = start_engine()
    heard = Heard()

    async def body(pool: EnginePool, dispatcher: Dispatcher, _: list) -> None:
        pause(server)
        calls = [asyncio.create_task(dispatcher.generate(PROMPT, Sampling(2), n=1)) for _ in range(3)]
        await until(lambda: held(server) == 3)
        pool.admit("engine 0", 1)
        resume(server)
        await asyncio.gather(*calls)
        pool.admit("engine 0", 2)  # idle: no stretch to cut

    using([url], body, heard=heard)
    assert [engine for engine, _, _ in heard.spans] == ["engine 0"] * 2
    (_, start, cut), (_, goes_on, end) = heard.spans
    assert start < cut == goes_on < end


def test_what_a_quarantined_engine_still_generates_is_generated_again_elsewhere(start_engine) -> None:
    (first, url_0), (_, url_1) = start_engine(), start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, failures: list[tuple[str, str]]) -> None:
        pause(first)
        request = asyncio.create_task(dispatcher.generate(PROMPT, Sampling(3), n=1))
        await until(lambda: held(first) == 1)
        pool.quarantine("engine 0", "its proof failed")
        assert len(await request) == 1
        assert failures == [("engine 0", "engine 0 was quarantined while it answered: its proof failed")]
        await until(lambda: held(first) == 0)

    using([url_0, url_1], body)


@pytest.mark.parametrize("proven", [True, False])
def test_samples_of_new_weights_wait_for_their_proof(start_engine, proven: bool) -> None:
    _, url = start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, _: list) -> None:
        pool.admit("engine 0", -1)  # it serves version 0, which it has not proved
        request = asyncio.create_task(dispatcher.generate(PROMPT, Sampling(3), n=1))
        assert not (await asyncio.wait([request], timeout=0.3))[0]
        if proven:
            pool.admit("engine 0", 0)
            assert (await request)[0].versions == (0,) * len((await request)[0].versions)
        else:
            pool.quarantine("engine 0", "its weights are old")
            with pytest.raises(EngineError, match="its weights are old"):
                await request

    using([url], body)


def test_a_session_stays_with_its_engine_and_yields_to_balance(start_engine) -> None:
    (first, url_0), (second, url_1) = start_engine(), start_engine()
    heard = Heard()

    async def body(pool: EnginePool, dispatcher: Dispatcher, _: list) -> None:
        for _ in range(3):  # idle engines would take turns
            await dispatcher.generate(PROMPT, Sampling(2), n=1, session="a")
        assert [engine for engine, _, _ in heard.spans] == ["engine 0"] * 3
        pause(first, second)
        calls = [asyncio.create_task(dispatcher.generate(PROMPT, Sampling(2), n=1, session="a")) for _ in range(6)]
        await until(lambda: held(first) + held(second) == 6)
        assert (held(first), held(second)) == (5, 1)
        resume(first)
        resume(second)
        await asyncio.gather(*calls)

    using([url_0, url_1], body, heard=heard)


def test_a_request_that_only_fails_itself_is_raised_and_quarantines_nobody(start_engine, monkeypatch) -> None:
    (_, url_0), (_, url_1) = start_engine(), start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, failures: list) -> None:
        async def fail(*_: Any, **__: Any) -> None:
            raise EngineError("500: this prompt breaks me")

        for name in pool.states:
            monkeypatch.setattr(pool.client(name), "generate", fail)
        with pytest.raises(EngineError, match="500: this prompt breaks me"):
            await dispatcher.generate(PROMPT, Sampling(2), n=1)
        assert len(failures) == 2 and len(pool.healthy) == 2

    using([url_0, url_1], body, heal_timeout_s=60.0)


def test_below_min_engines_requests_wait_for_one_to_heal_and_go_on(start_engine) -> None:
    (_, url_0), (_, url_1) = start_engine(), start_engine()
    heard = Heard()

    async def body(pool: EnginePool, dispatcher: Dispatcher, _: list) -> None:
        pool.quarantine("engine 1", "its canary is off")
        calls = [asyncio.create_task(dispatcher.generate(PROMPT, Sampling(2), n=1)) for _ in range(3)]
        assert not (await asyncio.wait(calls, timeout=0.1))[0]
        assert heard.notes == ["waiting up to 60 s for engines to heal: engine 0: serving; engine 1: its canary is off"]
        pool.mark_healing("engine 1")
        pool.admit("engine 1", 0)  # a late proof of a publish
        assert pool.states["engine 1"] is State.HEALING
        pool.restore("engine 1", 0)
        assert len(await asyncio.gather(*calls)) == 3
        assert pool.states == {"engine 0": State.SERVING, "engine 1": State.SERVING}

    using([url_0, url_1], body, min_engines=2, heal_timeout_s=60.0, heard=heard)


def test_a_request_that_every_engine_failed_goes_on_when_one_returns_at_another_url(start_engine) -> None:
    (first, url_0), (_, url_1) = start_engine(), start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, failures: list) -> None:
        await asyncio.to_thread(first.stop)
        call = asyncio.create_task(dispatcher.generate(PROMPT, Sampling(2), n=1))
        await until(lambda: pool.states["engine 0"] is State.QUARANTINED)
        pool.mark_healing("engine 0", url=url_1)
        pool.restore("engine 0", 0)
        assert [sample.num_retries for sample in await call] == [1]

    using([url_0], body, heal_timeout_s=60.0)


def test_a_wait_for_engines_ends_with_each_reason(start_engine) -> None:
    (first, url_0), (_, url_1) = start_engine(), start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, _: list) -> None:
        await asyncio.to_thread(first.stop)
        pool.quarantine("engine 1", "its canary is off")
        with pytest.raises(EngineError, match=r"can serve: engine 0: .* cannot be reached.*; engine 1: its canary is off; last: engine 0"):
            await dispatcher.generate(PROMPT, Sampling(2), n=1)

    using([url_0, url_1], body, heal_timeout_s=0.2)


def test_a_request_that_breaks_every_engine_that_heals_is_given_up(start_engine, monkeypatch) -> None:
    _, url = start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, failures: list) -> None:
        async def die(*_: Any, **__: Any) -> None:
            pool.quarantine("engine 0", "it died")
            asyncio.get_running_loop().call_later(0.01, pool.restore, "engine 0", 0)
            raise EngineError("the connection was reset")

        monkeypatch.setattr(pool.client("engine 0"), "generate", die)
        with pytest.raises(EngineError, match="engine 0 was quarantined while it answered: it died"):
            await dispatcher.generate(PROMPT, Sampling(2), n=1)
        assert len(failures) == 3

    using([url], body, heal_timeout_s=60.0)


def test_an_engine_that_stays_full_ends_in_its_own_words(start_engine) -> None:
    server, url = start_engine(max_running=1, max_queued=1)

    async def body(pool: EnginePool, dispatcher: Dispatcher, _: list) -> None:
        pause(server)
        call = asyncio.create_task(dispatcher.generate(PROMPT, Sampling(2), n=1))
        await until(lambda: held(server) == 1)
        with pytest.raises(BusyError):
            await Dispatcher(pool, request_timeout_s=3.0).generate(PROMPT, Sampling(2), n=1)
        resume(server)
        assert len(await call) == 1

    using([url], body)


def test_a_request_for_a_long_answer_has_a_longer_deadline(start_engine) -> None:
    server, url = start_engine()

    async def body(pool: EnginePool, dispatcher: Dispatcher, _: list) -> None:
        pause(server)
        short, long = (asyncio.create_task(dispatcher.generate(PROMPT, Sampling(most), n=1)) for most in (1, 40))
        with pytest.raises(DeadlineError, match="passed its deadline of 1 s"):
            await short
        resume(server)
        [sample] = await long
        assert sample.finish_reason in ("stop", "length")

    using([url], body, request_timeout_s=0.2, token_timeout_s=1.0)


def test_a_sample_goes_on_at_another_engine_and_in_another_process_as_it_would_have(start_engine) -> None:
    (first, url_0), (_, url_1) = start_engine(), start_engine()
    sampling = Sampling(40, seed=7, ignore_eos=True, stop=("#",))

    def same(found: list[Sample], wanted: list[Sample]) -> None:
        for one, other in zip(found, wanted, strict=True):
            assert (one.token_ids, one.text, one.finish_reason, one.versions) == (
                other.token_ids, other.text, other.finish_reason, other.versions)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)

    async def body(pool: EnginePool, dispatcher: Dispatcher, _: list) -> None:
        whole = await dispatcher.generate(PROMPT, sampling, n=3)
        assert max(len(sample.tokens) for sample in whole) == 40

        # An earlier process had 5 tokens of the first sample, 1 of the second and none of the third.
        hearing = Hearing(0.001, [_beginning(sample, length) for sample, length in zip(whole, (5, 1, 0), strict=True)])
        same(await dispatcher.generate(PROMPT, replace(sampling, hearing=hearing), n=3), whole)

        # It had all tokens of all samples: their ends are not drawn again, with or without a seed.
        for seed in (7, None):
            num_before = first._engine.num_generated_tokens
            hearing = Hearing(0.001, [_beginning(sample, len(sample.tokens)) for sample in whole])
            same(await dispatcher.generate(PROMPT, replace(sampling, seed=seed, hearing=hearing), n=3), whole)
            assert first._engine.num_generated_tokens == num_before

        hearing = Hearing(0.001, [KnownSample() for _ in range(3)])
        asking = asyncio.create_task(dispatcher.generate(PROMPT, replace(sampling, hearing=hearing), n=3))
        await until(lambda: hearing.num_tokens > 10 or asking.done())
        assert not asking.done()
        pause(first)
        num_before, generated = hearing.num_tokens, first._engine.num_generated_tokens
        pool.quarantine("engine 0", "it is tried out")
        found = await asking
        same(found, whole)
        assert [sample.num_retries for sample in found] == [1, 1, 1] and first._engine.num_generated_tokens == generated
        assert dispatcher.generated_tokens == 3 * sum(len(sample.tokens) for sample in whole) - 6 and num_before > 10
        same(await dispatcher.generate(PROMPT, sampling, n=3), whole)  # a seed gives the same at any engine

    using([url_0, url_1], body)


def test_samples_that_have_begun_wait_for_a_place_in_a_full_engine_while_others_of_their_call_go_on(start_engine) -> None:
    server, url = start_engine(max_running=1, max_queued=1)

    async def body(_pool: EnginePool, dispatcher: Dispatcher, failures: list) -> None:
        [whole] = await dispatcher.generate(PROMPT, sampling, n=1)
        num_before = server._engine.num_generated_tokens
        hearing = Hearing(0.001, [_beginning(whole, 2) for _ in range(5)])
        found = await dispatcher.generate(PROMPT, replace(sampling, hearing=hearing), n=5)
        assert [len(sample.tokens) for sample in found] == [8] * 5 and not failures
        assert server._engine.num_generated_tokens == num_before + 5 * 6  # none of them was stopped

    sampling = Sampling(8, seed=7, ignore_eos=True)
    using([url], body)


def _beginning(sample: Sample, length: int) -> KnownSample:
    return KnownSample(sample.tokens[:length], sample.token_logprobs[:length], sample.token_versions[:length])
