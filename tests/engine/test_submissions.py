"""Requests in flight: what the engine says reaches whoever waits, and what nobody waits for any more is dropped."""

import asyncio
import threading

import pytest

from engine_http import RL, call, fetch, run, until
from waiting import wait_until


def test_one_prompt_that_is_refused_ends_all_of_its_request(fresh):
    server, url = fresh
    status, _, answer = fetch(url, "/v1/completions", {"prompt": [[5, 6], [10**6]], "max_tokens": 150})
    assert status == 400 and "outside the vocabulary" in answer["error"]["message"]
    wait_until(lambda: not server._submissions and not server._engine.num_running and not server._engine.num_waiting, timeout_s=30)


def test_a_client_that_goes_away_takes_its_score_back(fresh):
    server, url = fresh

    async def body():
        begun, blocked = threading.Event(), threading.Event()
        server._loop.call(lambda: begun.set() or blocked.wait(60))
        await asyncio.to_thread(begun.wait, 60)  # otherwise the round that blocks may hold the scores, too
        calls = [asyncio.create_task(call(url, "/v1/score", {"tokens": [5, 6]})) for _ in range(2)]
        await until(lambda: len(server._submissions) == 2)
        calls[0].cancel()
        await until(lambda: len(server._submissions) == 1)
        blocked.set()
        assert (await calls[1])[0] == 200

    scored = []
    compute = server._engine._scorer.compute
    server._engine._scorer.compute = lambda jobs, *args, **more: scored.extend(jobs) or compute(jobs, *args, **more)
    run(body())
    assert len(scored) == 1 and not server._submissions


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_goes_away_aborts_its_samples(streaming, fresh, slow_down):
    server, url = fresh
    slow_down(server._engine)

    async def scenario() -> None:
        body = {"prompt": "a", "n": 3, "max_tokens": 150, "stream": streaming, **RL}
        task = asyncio.create_task(call(url, "/v1/completions", body))
        await until(lambda: server._engine.num_running == 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: server._engine.num_running == 0)
        assert server._engine.finished["abort"] == 3
        await until(lambda: not server._submissions)

    run(scenario())
