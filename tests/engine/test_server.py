"""The HTTP contract: OpenAI's answers and errors, streaming, aborts, weight control, and the ends of a server's life."""

import asyncio
import json
import socket
import threading
import time

import aiohttp
import pytest
import torch

from engine_http import RL, call, fetch, run, serving, stream, until
from named_bytes import named_bytes
from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from offbeat.errors import PortBusyError
from offbeat.model.fingerprint import fingerprint
from waiting import wait_until


def test_a_chat_uses_the_template(url, model_folder):
    messages = [{"role": "user", "content": "hi"}]
    status, _, answer = fetch(url, "/v1/chat/completions", {"messages": messages, "max_tokens": 5, "ignore_eos": True, "logprobs": True})
    (choice,) = answer["choices"]
    assert status == 200 and answer["object"] == "chat.completion" and answer["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")
    assert choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"]) == 5 and choice["logprobs"]["content"][0]["logprob"] < 0


def test_a_chat_may_fill_the_context(url):
    body = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
    answer = fetch(url, "/v1/chat/completions", body)[2]
    assert answer["usage"]["total_tokens"] == 160
    limited = fetch(url, "/v1/chat/completions", {**body, "max_completion_tokens": 3})[2]
    assert limited["usage"]["completion_tokens"] == 3


def test_a_stream_adds_up_to_the_whole_answer(url):
    body = {"prompt": "12+3", "n": 2, "max_tokens": 12, "seed": 5, **RL}
    whole = fetch(url, "/v1/completions", body)[2]
    events = run(stream(url, "/v1/completions", {**body, "stream": True}))
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert len(mine) == 12
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [t for piece in mine for t in piece["token_ids"]] == choice["token_ids"]
        assert [p["finish_reason"] for p in mine] == [None] * 11 + ["length"]
    chat = run(stream(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}))
    assert chat[0]["object"] == "chat.completion.chunk" and "content" in chat[0]["choices"][0]["delta"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {}, "missing required field `prompt`"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt mixes token ids with prompts"),
        ("/v1/completions", {"prompt": {"text": "a"}}, "prompt takes a string, a list of token ids, or a list of such prompts"),
        ("/v1/completions", {"prompt": ["a", ""]}, "the prompt is empty"),
        ("/v1/completions", {"prompt": ["a"] * 4097}, "prompt takes at most 4096 prompts here, got 4097"),
        ("/v1/completions", {"prompt": "a", "presence_penalty": 5}, "presence_penalty must be -2 to 2, got 5"),
        ("/v1/chat/completions", {"messages": [], "top_logprobs": 3}, "messages is empty"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "many"}, "$.max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature must be 0"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix is not honoured"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "n must be >= 1"),
        ("/v1/completions", {"prompt": ""}, "the prompt is empty"),
        ("/v1/completions", {"prompt": [10**6]}, "outside the vocabulary"),
        ("/v1/completions", {"prompt": [5] * 150, "max_tokens": 20, "stream": True}, "150 tokens and max_tokens is 20"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, "empty string"),
        ("/v1/chat/completions", {"messages": [{"content": "hi"}]}, "missing required field `role`"),
        ("/v1/score", {"tokens": [5]}, "2 to 160 tokens"),
        ("/v1/score", {"tokens": [5, 6], "targets": [[]]}, "one list for each of the 2 tokens, got 1 lists"),
        ("/v1/completions", {"prompt": "a", "logprobs": -1}, "logprobs must be 0 to 1024 likeliest tokens, got -1"),
        ("/v1/weights/stage", {"version": 1, "folder": "nowhere"}, "nowhere holds no model.safetensors"),
        ("/v1/weights/switch", {"version": 1, "interrupt": "maybe"}, "$.interrupt"),
        ("/pause", {"mode": "later"}, "$.mode"),
    ],
)
def test_wrong_requests_are_answered_400_with_the_reason(path, body, message, url):
    status, _, answer = fetch(url, path, body)
    assert status == 400 and message in answer["error"]["message"], answer
    assert answer["error"]["type"] == "invalid_request_error"


def test_what_is_not_json_is_answered_400(url):
    async def post() -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.post(
            url + "/v1/completions", data=b"{nope", headers={"Content-Type": "application/json"}) as response:
            return response.status, await response.text()

    status, text = run(post())
    assert status == 400 and "request body is wrong" in text


def test_models_health_and_metrics(url):
    assert fetch(url, "/v1/models")[2]["data"][0]["max_model_len"] == 160
    assert fetch(url, "/health")[2] == {
        "status": "ok", "paused": None, "version": 0, "running": 0, "waiting": 0, "max_context": 160, "max_adapter_rank": 64}
    status, headers, text = fetch(url, "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain")
    for name in ("running 0.0", "waiting 0.0", "weight_version 0.0", "prompt_tokens_total", "generated_tokens_total", "switch_seconds"):
        assert f"offbeat_engine_{name}" in text


def test_a_score_tells_of_the_likeliest_tokens_and_of_targets_where_they_are_asked_for(url, reference):
    table = reference("qwen3").logits([5, 9, 20])[:-1].log_softmax(-1)
    plain = fetch(url, "/v1/score", {"tokens": [5, 9, 20]})[2]
    assert plain.keys() == {"version", "logprobs"}
    answer = fetch(url, "/v1/score", {"tokens": [5, 9, 20], "top_k": 2, "targets": [[1], [], [3, 4]]})[2]
    assert answer["logprobs"] == pytest.approx(plain["logprobs"], abs=1e-5)
    assert [[token for token, _ in row] for row in answer["top_logprobs"]] == table.topk(2).indices.tolist()
    assert answer["target_logprobs"] == [[], pytest.approx(table[1, [3, 4]].tolist(), abs=1e-4)]


def test_a_key_is_wanted_where_one_is_set(model_folder):
    with serving(model_folder("qwen3"), api_key="secret") as (_, url):
        assert fetch(url, "/health")[0] == 401
        status, _, answer = fetch(url, "/v1/completions", {"prompt": "a"}, headers={"Authorization": "Bearer wrong"})
        assert status == 401 and "Authorization: Bearer KEY" in answer["error"]["message"]
        assert fetch(url, "/health", headers={"Authorization": "Bearer secret"})[0] == 200


@pytest.mark.parametrize(("headers", "status", "reason"), [
    ({"Host": "evil.example:8001"}, 403, "answers to 127.0.0.1 and localhost only, not to 'evil.example:8001'"),
    ({"Origin": "https://evil.example"}, 403, "does nothing for a page of 'https://evil.example'"),
    ({"Origin": "null"}, 403, "does nothing for a page of 'null'"),
    ({"Content-Type": "text/plain"}, 415, "the body must be JSON"),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "the body must be JSON"),
    ({"Origin": "http://localhost:3000", "Content-Type": "application/json; charset=utf-8"}, 200, "")])
def test_without_a_key_no_web_page_can_use_an_engine(url, headers, status, reason):
    async def post(path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.post(url + path, data=b"{}", headers=headers) as response:
            return response.status, await response.text()

    for path in ("/pause", "/resume"):
        answered, text = run(post(path))
        assert answered == status and reason in text
    assert fetch(url, "/health")[2]["status"] == "ok"


def test_with_a_key_a_proxy_may_ask_under_any_name(model_folder):
    with serving(model_folder("qwen3"), api_key="secret") as (_, url):
        named = {"Host": "engines.example", "Authorization": "Bearer secret"}
        assert fetch(url, "/health", headers=named)[0] == 200
        assert fetch(url, "/health", headers=named | {"Authorization": "Bearer sécret"})[0] == 401


def test_health_tells_who_has_paused_an_engine_and_for_how_long(fresh):
    server, url = fresh
    assert fetch(url, "/health")[2]["paused"] is None
    server._models.started = 5.0
    fetch(url, "/pause", {"by": "the run before"})
    assert fetch(url, "/v1/models")[2]["data"][0]["created"] == 5  # a pause makes no model new
    time.sleep(0.02)
    pause = fetch(url, "/health")[2]["paused"]
    assert pause["by"] == "the run before" and pause["for_s"] >= 0.02
    fetch(url, "/resume", {})
    fetch(url, "/pause", {})
    assert fetch(url, "/health")[2]["paused"]["by"] == "127.0.0.1"
    fetch(url, "/resume", {})
    assert fetch(url, "/health")[2]["paused"] is None and not server._engine.paused


def test_a_full_queue_is_answered_429_and_waiting_requests_are_served(fresh):
    server, url = fresh

    async def scenario() -> None:
        await call(url, "/pause", {})
        assert (await call(url, "/health"))[2]["status"] == "paused"
        waiting = [asyncio.create_task(call(url, "/v1/completions", {"prompt": "a", "max_tokens": 3, **RL})) for _ in range(2)]
        await until(lambda: server._engine.num_waiting == 2)
        status, headers, answer = await call(url, "/v1/completions", {"prompt": "a"})
        assert status == 429 and headers["Retry-After"] == "1" and "queue is full" in answer["error"]["message"]
        await call(url, "/resume", {})
        assert [(await task)[0] for task in waiting] == [200, 200]

    run(scenario())


@pytest.mark.parametrize("interrupt", ["recompute", "keep", "drain"])
def test_weights_are_staged_switched_and_proved_while_requests_run(interrupt, fresh, model_folder, reference, slow_down):
    server, url = fresh
    let_go = slow_down(server._engine)
    folder = model_folder("qwen3", 1)

    async def scenario() -> list[dict]:
        body = {"prompt": [5, 9], "n": 2, "max_tokens": 60, "seed": 2, **RL}
        running = asyncio.create_task(call(url, "/v1/completions", body))
        await until(lambda: server._engine.num_generated_tokens >= 8)
        for _ in range(2):
            assert (await call(url, "/v1/weights/stage", {"version": 7, "folder": folder}))[0] == 200
        if interrupt == "drain":
            let_go.set()
        status, _, answer = await call(url, "/v1/weights/switch", {"version": 7, "interrupt": interrupt})
        let_go.set()
        assert status == 200 and answer["version"] == 7 and answer["switch_s"] >= 0
        live = (await call(url, "/v1/weights/fingerprint"))[2]
        assert live == {"version": 7, "fingerprint": fingerprint(named_bytes(reference("qwen3", 1).model))}
        score = (await call(url, "/v1/score", {"tokens": [5, 9, 20, 3]}))[2]
        assert score["version"] == 7
        assert (await call(url, "/v1/weights/prove", {"tokens": [5, 9, 20, 3]}))[2] == live | {"logprobs": score["logprobs"]}
        assert torch.allclose(torch.tensor(score["logprobs"]), reference("qwen3", 1).logprobs([5, 9, 20, 3]), atol=1e-4)
        choices = (await running)[2]["choices"]
        for body in ({"folder": model_folder("qwen3", 2)}, {"folder": model_folder("qwen3"), "fingerprint": "of a resumed run"}):
            assert (await call(url, "/v1/weights/stage", {"version": 7, **body}))[0] == 200
        assert (await call(url, "/v1/weights/switch", {"version": 7, "interrupt": interrupt}))[0] == 200
        live = (await call(url, "/v1/weights/fingerprint"))[2]
        assert live == {"version": 7, "fingerprint": fingerprint(named_bytes(reference("qwen3").model))}
        return choices

    for choice in run(scenario()):
        versions, tokens = choice["versions"], [5, 9, *choice["token_ids"]]
        changed = versions.count(0)
        assert versions == [0] * changed + [7] * (60 - changed)
        assert changed == 60 if interrupt == "drain" else 4 <= changed < 60
        got = torch.tensor(choice["logprobs"]["token_logprobs"])
        assert torch.allclose(got[:changed], reference("qwen3").logprobs(tokens)[1 : 1 + changed], atol=1e-4)
        if interrupt == "recompute":
            assert torch.allclose(got[changed:], reference("qwen3", 1).logprobs(tokens)[1 + changed :], atol=1e-4)


def test_pause_abort_answers_with_partial_samples(fresh, slow_down):
    server, url = fresh
    slow_down(server._engine)

    async def scenario() -> dict:
        running = asyncio.create_task(call(url, "/v1/completions", {"prompt": "a", "max_tokens": 150, **RL}))
        await until(lambda: server._engine.num_generated_tokens >= 3)
        await call(url, "/pause", {"mode": "abort"})
        return (await running)[2]["choices"][0]

    choice = run(scenario())
    assert choice["finish_reason"] == "abort" and 3 <= len(choice["token_ids"]) == len(choice["versions"]) < 150


def test_a_failed_engine_fails_its_requests_and_its_health(fresh):
    server, url = fresh

    def broken(*_step, **_options):
        raise RuntimeError("out of luck")

    server._engine._forward.decode = broken
    for path, body in (("/v1/completions", {"prompt": "a", "max_tokens": 9, **RL}), ("/health", None), ("/v1/score", {"tokens": [5, 6]})):
        status, _, answer = fetch(url, path, body)
        assert status == 500 and "out of luck" in answer["error"]["message"]


def test_stopping_answers_what_is_in_flight_and_leaves_no_thread(model_folder, slow_down):
    before = threading.active_count()
    with serving(model_folder("qwen3")) as (server, url):
        slow_down(server._engine)

        async def scenario():
            running = asyncio.create_task(call(url, "/v1/completions", {"prompt": "a", "max_tokens": 150, **RL}))
            await until(lambda: server._engine.num_running == 1)
            await asyncio.to_thread(server.stop)
            return await running

        status, _, answer = run(scenario())
        assert status == 500 and "the engine was stopped" in answer["error"]["message"]
    assert threading.active_count() <= before


def test_a_taken_port_is_said_plainly(model_folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortBusyError, match=f"127.0.0.1:{port}: Address already in use; choose another port"):
            EngineServer(EngineOptions(model=model_folder("qwen3"))).start(port=port)


def compute_until(let_go: threading.Event) -> None:
    while not let_go.is_set():
        pass


@pytest.mark.parametrize(("act", "patience_s", "factor", "how"), [
    (lambda let_go: let_go.wait(60), 1.0, 60, "and has computed nothing for 1 s of it"), (compute_until, 1.5, 2, "although it computes")],
    ids=["sleeps", "computes"])
def test_a_step_that_does_not_end_is_told_by_health(act, patience_s, factor, how, model_folder, monkeypatch):
    monkeypatch.setattr("offbeat.engine.stall.COMPUTING_FACTOR", factor)
    let_go, told = threading.Event(), []

    def ill() -> bool:
        status, _, answer = fetch(url, "/health")
        if status == 500:
            told.append(answer["error"]["message"])
        return bool(told)

    with serving(model_folder("qwen3"), stall_timeout_s=patience_s) as (server, url):
        server._loop.call(lambda: act(let_go))
        try:
            wait_until(ill, timeout_s=60)
        finally:
            let_go.set()
        assert told[0].startswith("the engine is slow or hung: it has been in one step for ") and f"s, {how}; if the" in told[0]
        wait_until(lambda: fetch(url, "/health")[0] == 200, timeout_s=60)


def test_structures_of_answers_are_kept_or_refused(url):
    body = {"prompt": [5, 6], "max_tokens": 12, "n": 4, "guided_choice": ["one", "two", "onetwo"]}
    status, _, answer = fetch(url, "/v1/completions", body)
    assert status == 200 and {choice["text"] for choice in answer["choices"]} <= {"one", "two", "onetwo"}, answer
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    status, _, answer = fetch(url, "/v1/completions", {**body, "guided_choice": None, "structured_outputs": {"regex": "("}})
    assert status == 400 and "the regex of the answer's structure cannot be kept" in answer["error"]["message"]


def test_a_stream_that_comes_to_nothing_that_may_follow_says_that_the_request_is_wrong(url):
    body = {"prompt": [5, 6], "max_tokens": 4, "allowed_token_ids": [7], "bad_words": ["44"], "stream": True, "ignore_eos": True}

    async def lines() -> list[str]:
        async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as response:
            return [line.decode() async for line in response.content if line.strip()]

    first, error = (json.loads(line.removeprefix("data: ")) for line in run(lines()))
    assert first["choices"][0]["text"] == "4" and error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith("no token may follow")


def test_likeliest_tokens_of_chats_come_with_their_bytes(url):
    asked = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 2, "temperature": 0, "top_logprobs": 3}
    entries = fetch(url, "/v1/chat/completions", asked)[2]["choices"][0]["logprobs"]["content"]
    assert len(entries) == 2
    for entry in entries:
        assert [len(entry["top_logprobs"]), entry["top_logprobs"][0]["logprob"]] == [3, entry["logprob"]]
        assert bytes(entry["bytes"]).decode() == entry["token"]


