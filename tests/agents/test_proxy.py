"""The proxy over real HTTP: what clients of three dialects get, what is recorded, and what happens when something fails."""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest

from chats import CHATML, words
from field_requests import field_requests
from offbeat.agents.proxy import MAX_BODY_BYTES, Proxy, ProxyAddress
from offbeat.agents.recorder import EpisodeLimits
from offbeat.agents.sessions import Session
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer
from offbeat.config.model import TinyConfig
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import BusyError, EngineError, PortBusyError, RefusedError
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.pool import EnginePool
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import Sample, Sampling
from offbeat.model.tiny import build_tiny
from offbeat.weights.protocol import Manifest
from waiting import until

SAMPLING = Sampling(max_new_tokens=24)
USER = {"role": "user", "content": "hello"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@dataclass
class Script:
    """Generates what it is told; while `held`, it waits."""

    tokenizer: Tokenizer
    texts: list[str] = field(default_factory=list)
    held: bool = False
    error: Exception | None = None
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    num_cancelled: int = 0
    num_cached: int = 0

    async def __call__(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        self.prompts.append(prompt)
        try:
            await until(lambda: not self.held)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return [self._sample(self.texts.pop(0) if self.texts else "ok") for _ in range(n)]

    def _sample(self, text: str) -> Sample:
        ids = tuple(self.tokenizer.encode(text + "<|im_end|>"))
        versions = (len(self.prompts),) * len(ids)
        return Sample(ids, (-0.5,) * len(ids), versions, text, "stop", num_cached_tokens=self.num_cached)


@dataclass
class World:
    proxy: Proxy
    script: Script
    http: aiohttp.ClientSession
    session: Session

    def headers(self, key: str = "", **more: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key or self.session.key}"} | {name.replace("_", "-"): value for name, value in more.items()}

    async def post(self, body: Any, path: str = "/v1/chat/completions", *, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        async with self.http.post(self.proxy.url + path, json=body, headers=self.headers() if headers is None else headers) as answer:
            data = await answer.read()
        kind = answer.headers["Content-Type"]
        return answer.status, json.loads(data) if kind == "application/json" else events(data.decode())

    async def ask(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Ask for one answer as a chat, and return its message."""
        status, answer = await self.post({"messages": messages} | fields)
        assert status == 200, answer
        return answer["choices"][0]["message"]

    def chains(self, reward: float = 1.0) -> list[Any]:
        return self.session.chains(reward, episode=0)


def events(text: str) -> list[Any]:
    """The data of server-sent events, and comments as they are."""
    found = []
    for event in text.split("\n\n")[:-1]:
        data = next((line.removeprefix("data: ") for line in event.split("\n") if line.startswith("data: ")), event)
        found.append(json.loads(data) if data.startswith("{") else data)
    return found


def play(body: Callable[[World], Awaitable[None]], *, limits: EpisodeLimits | None = None, **options: Any) -> None:
    async def main() -> None:
        renderer = Renderer(words(CHATML))
        script = Script(renderer.tokenizer)
        async with Proxy(renderer, AnswerParser(renderer), **{"linger_s": 0.05} | options) as proxy, aiohttp.ClientSession() as http:
            await body(World(proxy, script, http, proxy.open(script, SAMPLING, limits=limits)))

    asyncio.run(asyncio.wait_for(main(), 60))


def trained(world: World, trajectory: Any) -> list[str]:
    """The texts that are trained."""
    runs = np.flatnonzero(np.diff([0, *trajectory.loss_mask.astype(int), 0])).reshape(-1, 2)
    return [world.script.tokenizer.decode(trajectory.tokens[a:b].tolist()) for a, b in runs]


def hold_rendering(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let chats be rendered only when the second event is set; the first says that one is about to be."""
    rendering, go_on, prompt = threading.Event(), threading.Event(), Renderer.prompt

    def slow(*args: Any, **kwargs: Any) -> Any:
        rendering.set()
        assert go_on.wait(20), "the event loop waits for the renderer"
        return prompt(*args, **kwargs)

    monkeypatch.setattr(Renderer, "prompt", slow)
    return rendering, go_on


# -- dialects --------------------------------------------------------------------------------------------------------------------------


def test_a_chat_with_a_tool_is_recorded_as_one_chain():
    async def body(world: World) -> None:
        world.script.texts = [CALL, "it is 3"]
        message = await world.ask(USER, tools=[ADD])
        [call] = message["tool_calls"]
        assert message["content"] is None and json.loads(call["function"]["arguments"]) == {"a": 1}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        assert (await world.ask(USER, message, result, tools=[ADD]))["content"] == "it is 3"
        [trajectory] = world.chains()
        assert trained(world, trajectory) == [CALL, "it is 3"]
        assert trajectory.versions[trajectory.loss_mask].tolist() == [1] * (len(CALL) + 1) + [2] * 8

    play(body)


def test_chats_are_rendered_beside_the_event_loop_and_a_repeated_call_waits_for_its_first_try(monkeypatch: pytest.MonkeyPatch):
    async def body(world: World) -> None:
        rendering, go_on = hold_rendering(monkeypatch)
        first = asyncio.create_task(world.ask(USER))
        await until(rendering.is_set)
        again = asyncio.create_task(world.post({"messages": [USER]}, headers=world.headers(x_stainless_retry_count="1")))
        await asyncio.sleep(0.05)
        go_on.set()
        assert (await first)["content"] == (await again)[1]["choices"][0]["message"]["content"] == "ok"
        assert len(world.script.prompts) == 1 and world.session.num_turns == 1

    play(body)


def test_an_episode_that_ends_while_its_chat_is_rendered_records_nothing(monkeypatch: pytest.MonkeyPatch):
    async def body(world: World) -> None:
        rendering, go_on = hold_rendering(monkeypatch)
        late = asyncio.create_task(world.post({"messages": [USER]}))
        await until(rendering.is_set)
        assert world.chains() == []
        go_on.set()
        status, told = await late
        assert status == 409 and "this episode has ended" in told["error"]["message"] and not world.script.prompts

    play(body)


def test_a_chat_may_be_told_its_tokens():
    async def body(world: World) -> None:
        _, answer = await world.post({"messages": [USER], "return_token_ids": True})
        [trajectory] = world.chains()
        mask = trajectory.loss_mask
        assert answer["prompt_token_ids"] + answer["choices"][0]["token_ids"] == trajectory.tokens.tolist()
        assert answer["choices"][0]["versions"] == trajectory.versions[mask].tolist()

    play(body)


def test_answers_tell_how_much_of_the_prompt_the_engine_had_computed_before():
    async def body(world: World) -> None:
        world.script.num_cached = 16
        _, told = await world.post({"messages": [{"role": "user", "content": "hi"}]})
        assert told["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
        _, told = await world.post({"input": "hi"}, "/v1/responses")
        assert told["usage"]["input_tokens_details"]["cached_tokens"] == 16

    play(body)


def test_the_responses_api_is_recorded_as_one_chain():
    async def body(world: World) -> None:
        world.script.texts = ["let me see\n" + CALL, "it is 3"]
        tool = {"type": "function", **ADD["function"]}
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
        _, answer = await world.post({"input": items, "tools": [tool], "instructions": "be brief"}, "/v1/responses")
        said, call = answer["output"]
        assert said["content"][0]["text"] == "let me see"
        items += [said, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}]
        _, answer = await world.post({"input": items, "tools": [tool], "instructions": "be brief"}, "/v1/responses")
        assert answer["output"][0]["content"][0]["text"] == "it is 3"
        [trajectory] = world.chains()
        assert len(trained(world, trajectory)) == 2

    play(body)


def test_the_messages_api_is_recorded_as_one_chain_and_its_count_is_no_turn():
    async def body(world: World) -> None:
        world.script.texts = [CALL, "it is 3"]
        tools = [{"name": "add", "input_schema": ADD["function"]["parameters"]}]
        first = {"messages": [USER], "tools": tools, "max_tokens": 9}
        _, counted = await world.post({"messages": [USER], "tools": tools}, "/v1/messages/count_tokens")
        key = {"x-api-key": world.session.key}
        _, answer = await world.post(first, "/v1/messages", headers=key)
        assert answer["usage"]["input_tokens"] == counted["input_tokens"] == len(world.script.prompts[0])
        result = {"type": "tool_result", "tool_use_id": answer["content"][0]["id"], "content": "3"}
        messages = [USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        _, answer = await world.post(first | {"messages": messages}, "/v1/messages", headers=key)
        assert answer["content"] == [{"type": "text", "text": "it is 3"}]
        assert len(trained(world, *world.chains())) == 2

    play(body)


def test_a_stream_is_kept_alive_until_its_answer_is_complete():
    async def body(world: World) -> None:
        world.script.held = True
        body = {"messages": [USER], "stream": True}
        async with world.http.post(world.proxy.url + "/v1/chat/completions", json=body, headers=world.headers()) as answer:
            begun = await answer.content.readuntil(b": keep-alive\n\n") + await answer.content.readuntil(b": keep-alive\n\n")
            world.script.held = False
            stream = events((begun + await answer.read()).decode())
        assert answer.status == 200 and stream[-1] == "[DONE]"
        assert "".join(part["choices"][0]["delta"].get("content") or "" for part in stream if isinstance(part, dict)) == "ok"
        assert trained(world, *world.chains()) == ["ok"]

    play(body, keep_alive_s=0.05)


def test_a_stream_that_fails_after_it_has_begun_says_so_in_an_event():
    async def body(world: World) -> None:
        world.script.held, world.script.error = True, EngineError("engines died")
        chat = {"messages": [USER], "max_tokens": 5, "stream": True}
        for path, name, asked in (
            ("/v1/chat/completions", "error", chat), ("/v1/messages", "type", chat),
            ("/v1/responses", "type", {"input": "hello", "stream": True}),
        ):
            async with world.http.post(world.proxy.url + path, json=asked, headers=world.headers()) as answer:
                begun = await answer.content.readuntil(b"\n\n")
                world.script.held = False
                stream = events((begun + await answer.read()).decode())
            world.script.held = True
            assert answer.status == 200 and name in stream[-1] and "engines died" in json.dumps(stream[-1])
        assert world.chains() == []

    play(body, keep_alive_s=0.05)


def test_several_answers_to_one_request_are_branches():
    async def body(world: World) -> None:
        world.script.texts = ["one", "two"]
        _, answer = await world.post({"messages": [USER], "n": 2})
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["one", "two"]
        await world.ask(USER, answer["choices"][1]["message"], USER)
        assert [trained(world, trajectory) for trajectory in world.chains()] == [["one"], ["two", "ok"]]

    play(body)


# -- keys ------------------------------------------------------------------------------------------------------------------------------


def test_a_session_is_reached_by_its_key_alone():
    async def body(world: World) -> None:
        other = world.proxy.open(world.script, SAMPLING)
        chat = {"messages": [USER]}
        for headers in ({}, world.headers("wrong"), {"x-api-key": "wrong"}, {"X-Session-ID": world.session.key}):
            assert (await world.post(chat, headers=headers))[0] == 401
            async with world.http.get(f"{world.proxy.url}/v1/models", headers=headers) as answer:
                assert answer.status == 401
        path = f"/sessions/{other.key}/v1/chat/completions"
        assert (await world.post(chat, path, headers={}))[0] == (await world.post(chat, path, headers=world.headers("unused")))[0] == 200
        assert (await world.post(chat, headers={"x-api-key": world.session.key}))[0] == 200
        assert (world.session.num_turns, other.num_turns) == (1, 2)
        assert world.proxy.path_url(other) + "/v1/chat/completions" == world.proxy.url + path
        async with world.http.get(f"{world.proxy.url}/v1/models", headers=world.headers()) as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["policy"]

    play(body)


def test_beyond_this_machine_it_says_so_and_keys_keep_others_out(caplog):
    async def body(world: World) -> None:
        assert world.proxy.url.startswith("http://localhost:") and "listens on 0.0.0.0:" in world.proxy.exposed
        assert world.proxy.path_url(world.session).startswith(world.proxy.url)
        assert (await world.ask(USER))["content"] == "ok"
        for headers in ({}, world.headers("sk-guess")):
            assert (await world.post({"messages": [USER]}, headers=headers))[0] == 401

    play(body, address=ProxyAddress("0.0.0.0", told_host="localhost"))
    [said] = [record.message for record in caplog.records if record.name == "offbeat.agents.proxy"]
    assert "whoever reaches it and has an episode's key takes part in that episode" in said

    async def at_home(world: World) -> None:
        assert world.proxy.url.startswith("http://127.0.0.1:") and not world.proxy.exposed

    caplog.clear()
    play(at_home)
    assert not caplog.records


def test_sessions_that_share_a_key_are_told_apart_by_a_header():
    async def body(world: World) -> None:
        chat = {"messages": [USER]}
        group, other = (world.proxy.open_group(world.script, SAMPLING) for _ in range(2))
        for name, key in (("a", group.key), ("b", group.key), ("a", group.key), ("a", other.key)):
            assert (await world.post(chat, headers=world.headers(key, X_Session_ID=name)))[0] == 200
        status, answer = await world.post(chat, headers=world.headers(group.key))
        assert status == 400 and "X-Session-ID" in answer["error"]["message"]
        assert [group.session("a").num_turns, group.session("b").num_turns, other.session("a").num_turns] == [2, 1, 1]
        # A key of one episode is not shared, whatever the header says.
        assert (await world.post(chat, headers=world.headers(X_Session_ID="a")))[0] == 200
        assert world.session.num_turns == 1
        assert len(group.session("a").chains(1.0, episode=0)) == 2
        assert (await world.post(chat, headers=world.headers(group.key, X_Session_ID="a")))[0] == 409
        assert (await world.post(chat, headers=world.headers(group.key, X_Session_ID="b")))[0] == 200
        world.proxy.close(group)
        for name in ("b", "new"):
            assert (await world.post(chat, headers=world.headers(group.key, X_Session_ID=name)))[0] == 409
        assert (await world.post(chat, headers=world.headers(other.key, X_Session_ID="a")))[0] == 200

    play(body)


def test_calls_after_the_end_of_an_episode_answer_409_and_are_not_recorded():
    async def body(world: World) -> None:
        await world.ask(USER)
        world.script.held = True
        running = asyncio.create_task(world.post({"messages": [USER]}))
        await until(lambda: len(world.script.prompts) == 2)
        assert len(world.chains()) == 1
        assert (await running)[0] == 409 and world.script.num_cancelled == 1
        status, answer = await world.post({"messages": [USER]})
        assert status == 409 and "ended" in answer["error"]["message"]
        world.proxy.close(world.session)
        assert (await world.post({"messages": [USER]}))[0] == 409
        assert len(world.chains()) == 1 and len(world.script.prompts) == 2

    play(body)


# -- faults ----------------------------------------------------------------------------------------------------------------------------


def test_a_client_that_goes_ends_its_call_a_while_later():
    async def body(world: World) -> None:
        world.script.held = True
        asking = [asyncio.create_task(world.post({"messages": [USER], "stream": stream})) for stream in (False, True)]
        await until(lambda: len(world.script.prompts) == 2)
        await asyncio.sleep(0.05)
        for client in asking:
            client.cancel()
        await until(lambda: world.script.num_cancelled == 2)
        assert world.session.num_turns == 0 and world.chains() == []

    play(body, keep_alive_s=0.02)


def test_an_answer_whose_client_has_gone_is_dropped():
    async def body(world: World) -> None:
        world.script.held = True
        asking = asyncio.create_task(world.post({"messages": [USER]}))
        await until(lambda: world.script.prompts)
        asking.cancel()
        await asyncio.sleep(0.1)
        world.script.held = False
        await until(lambda: world.session._recorder._nodes)
        assert world.script.num_cancelled == 0 and world.chains() == []

    play(body, linger_s=30.0)


@pytest.mark.parametrize("again", [{"x-stainless-retry-count": "1"}, {"Idempotency-Key": "k"}, {}])
def test_another_try_joins_the_call_that_its_client_has_given_up(again):
    async def body(world: World) -> None:
        world.script.held = True
        first = world.headers() | (again if "Idempotency-Key" in again else {"x-stainless-retry-count": "0"})
        asking = asyncio.create_task(world.post({"messages": [USER]}, headers=first))
        await until(lambda: world.script.prompts)
        asking.cancel()
        await asyncio.sleep(0.1)
        second = asyncio.create_task(world.post({"messages": [USER]}, headers=world.headers() | again))
        await asyncio.sleep(0.1)
        world.script.held = False
        assert (await second)[0] == 200
        assert len(world.script.prompts) == 1 and trained(world, *world.chains()) == ["ok"]

    play(body, linger_s=30.0)


def test_an_answer_is_replayed_to_a_client_that_tries_again_and_recorded_once():
    async def body(world: World) -> None:
        world.script.texts = ["one", "two"]
        first = await world.ask(USER)
        for headers in ({"x-stainless-retry-count": "1"}, {"x-stainless-retry-count": "2"}):
            _, answer = await world.post({"messages": [USER]}, headers=world.headers() | headers)
            assert answer["choices"][0]["message"] == first
        assert len(world.script.prompts) == 1
        # The same words at another endpoint, or by a client that does not say that it tries again, are another call.
        assert (await world.ask(USER))["content"] == "two"
        assert len(world.chains()) == 2

    play(body)


def test_equal_calls_at_once_are_calls_of_their_own():
    async def body(world: World) -> None:
        world.script.held = True
        asking = [asyncio.create_task(world.ask(USER)) for _ in range(3)]
        await until(lambda: len(world.script.prompts) == 3)
        world.script.held, world.script.texts = False, ["one", "two", "three"]
        assert {message["content"] for message in await asyncio.gather(*asking)} == {"one", "two", "three"}
        assert len(world.chains()) == 3

    play(body)


def test_each_failure_has_its_status_and_another_try_is_another_call():
    async def body(world: World) -> None:
        for error, status in (
            (EngineError("engines died"), 503), (BusyError("full"), 429), (RefusedError("too long"), 400), (ZeroDivisionError("x"), 500)):
            world.script.error = error
            got, answer = await world.post({"messages": [USER]})
            assert got == status and str(error) in answer["error"]["message"]
        world.script.error = None
        assert (await world.post({"messages": [USER]}, headers=world.headers(x_stainless_retry_count="1")))[0] == 200
        assert (await world.post({"messages": []}))[0] == 400
        assert (await world.post({"messages": [USER], "min_p": 0.1}))[0] == 400
        assert world.session.num_turns == 1
        assert trained(world, *world.chains()) == ["ok"]

    play(body)


def test_a_call_past_a_limit_answers_400():
    async def body(world: World) -> None:
        await world.ask(USER)
        status, answer = await world.post({"messages": [USER]})
        assert status == 400 and "1 answers" in answer["error"]["message"]

    play(body, limits=EpisodeLimits(max_turns=1))


def test_a_body_that_is_too_large_is_refused():
    async def body(world: World) -> None:
        async with world.http.post(
            f"{world.proxy.url}/v1/messages", data=b" " * (MAX_BODY_BYTES + 1), headers=world.headers()) as answer:
            assert answer.status == 413

    play(body)


def test_an_answer_is_not_held_back_by_nagles_algorithm():
    async def body(world: World) -> None:
        await world.ask(USER)
        connections = world.proxy._server.server_state.connections
        assert connections
        for connection in connections:
            assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    play(body)


def test_a_malformed_call_comes_as_text_and_is_counted():
    async def body(world: World) -> None:
        world.script.texts = ['<tool_call>\n{"name": "add", \n</tool_call>']
        message = await world.ask(USER, tools=[ADD])
        assert message["content"].startswith("<tool_call>") and not message.get("tool_calls")
        [trajectory] = world.chains()
        assert trajectory.malformed_calls == 1

    play(body)


def test_a_port_that_is_taken_is_a_users_error():
    async def body(world: World) -> None:
        port = int(world.proxy.url.rpartition(":")[2])
        renderer = Renderer(words(CHATML))
        with pytest.raises(PortBusyError, match="cannot listen"):
            async with Proxy(renderer, AnswerParser(renderer), address=ProxyAddress(port=port)):
                pass

    play(body)


# -- real engines ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> str:
    """A random model with a tokenizer that knows ChatML."""
    folder = tmp_path_factory.mktemp("chat_model")
    tokenizer = words(CHATML, ("h", "e"), ("t", "h"), ("a", "n"))
    tokenizer.save(folder)
    tiny = TinyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64, max_positions=2048)
    build_tiny(
        folder, tiny=tiny, vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        seed=1)
    return str(folder)


def on_engines(urls: list[str], body: Callable[[Proxy, Dispatcher, aiohttp.ClientSession], Awaitable[None]]) -> None:
    async def main() -> None:
        renderer = Renderer(words(CHATML, ("h", "e"), ("t", "h"), ("a", "n")))
        async with EngineSession() as engines, Proxy(renderer, AnswerParser(renderer)) as proxy, aiohttp.ClientSession() as http:
            pool = EnginePool([EngineClient(f"engine {i}", url, engines.session) for i, url in enumerate(urls)])
            for name in pool.states:
                pool.admit(name, 0)
            await body(proxy, Dispatcher(pool, request_timeout_s=60), http)

    asyncio.run(asyncio.wait_for(main(), 120))


async def converse(http: aiohttp.ClientSession, proxy: Proxy, session: Session, *, num_turns: int, max_tokens: int = 12) -> None:
    messages = [{"role": "user", "content": "say the thing"}]
    headers = {"Authorization": f"Bearer {session.key}"}
    for _ in range(num_turns):
        body = {"messages": messages, "max_tokens": max_tokens}
        async with http.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            messages += [(await answer.json())["choices"][0]["message"], {"role": "user", "content": "and then?"}]


def test_an_engine_scores_recorded_tokens_as_it_sampled_them(start_engine, chat_model):
    _, url = start_engine(model=chat_model)

    async def body(proxy: Proxy, dispatcher: Dispatcher, http: aiohttp.ClientSession) -> None:
        sessions = [proxy.open(dispatcher.generate, Sampling(max_new_tokens=24)) for _ in range(4)]
        await asyncio.gather(*(converse(http, proxy, session, num_turns=4) for session in sessions))
        for index, session in enumerate(sessions):
            [trajectory] = session.chains(1.0, episode=index)
            assert len(trajectory.turns) == 4
            score = await dispatcher.score(tuple(trajectory.tokens.tolist()))
            mask = trajectory.loss_mask
            assert np.allclose(np.array(score.logprobs)[mask], trajectory.rollout_logprobs[mask], atol=1e-4)

    on_engines([url], body)


def test_a_publish_during_a_call_shows_in_the_versions_of_its_tokens(start_engine, chat_model):
    server, url = start_engine(model=chat_model)

    async def body(proxy: Proxy, dispatcher: Dispatcher, http: aiohttp.ClientSession) -> None:
        session = proxy.open(dispatcher.generate, Sampling(max_new_tokens=1500, ignore_eos=True))
        talking = asyncio.create_task(converse(http, proxy, session, num_turns=1, max_tokens=1500))
        await until(lambda: server._engine.num_running)
        client, manifest = dispatcher.pool.client("engine 0"), Manifest(1, chat_model, "", (), ())
        await client.stage(manifest, timeout_s=30)
        await client.switch(manifest, interrupt="recompute", timeout_s=30)
        dispatcher.pool.admit("engine 0", 1)
        await talking
        [trajectory] = session.chains(1.0, episode=0)
        versions = trajectory.versions[trajectory.loss_mask]
        assert versions[0] == 0 and versions[-1] == 1 and (np.diff(versions) >= 0).all()

    on_engines([url], body)


def test_an_engine_that_dies_during_a_call_is_replaced_by_another(start_engine, chat_model):
    servers, urls = zip(*(start_engine(model=chat_model) for _ in range(2)), strict=True)

    async def body(proxy: Proxy, dispatcher: Dispatcher, http: aiohttp.ClientSession) -> None:
        session = proxy.open(dispatcher.generate, Sampling(max_new_tokens=1500, ignore_eos=True))
        talking = asyncio.create_task(converse(http, proxy, session, num_turns=2, max_tokens=700))
        await until(lambda: any(dispatcher.pool.outstanding.values()))
        busy = next(i for i, num in enumerate(dispatcher.pool.outstanding.values()) if num)
        await asyncio.to_thread(servers[busy].stop)
        await talking
        [trajectory] = session.chains(1.0, episode=0)
        assert trajectory.num_retries >= 1 and trajectory.loss_mask.sum() == 1400

    on_engines(list(urls), body)


def test_every_field_acts_or_is_refused_harmless_or_the_runs_as_the_table_says():
    async def body(world: World) -> None:
        tried = 0
        for path, asked, name, status in field_requests("proxy"):
            got, told = await world.post(asked, path)
            assert got == status, (path, name, told)
            if status == 400:
                assert name in told["error"]["message"] and (path == "/v1/messages" or told["error"]["param"].partition("[")[0] == name)
            tried += 1
        assert tried > 200

    play(body)
