"""Chats over HTTP: with tools on engines that write what they are told, and with owners' weights on a real one."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from chats import CHATML, words
from http_serving import Answer, Client, Serve, serving
from offbeat.chat import sending
from offbeat.chat.shaping import Shaping
from offbeat.data.tokenizer import Tokenizer
from offbeat.inference.sampling import Sample
from offbeat.inference.sampling import Sampling as EngineSampling
from offbeat.service.app.app import make_app
from offbeat.service.app.body import Bodies
from offbeat.service.app.journal import Journal
from offbeat.service.app.reply import Served
from offbeat.service.app.request_images import RequestImages
from offbeat.service.app.routes_chat import ChatRoutes
from offbeat.service.futures import Futures
from offbeat.service.keys import Keys
from offbeat.service.library import Library
from offbeat.service.limits import Limits, Usage
from offbeat.service.results import Results
from offbeat.service.samplers import Samplers
from offbeat.service.sampling import SamplingService
from offbeat.service.store import Store
from offbeat.service.types import Caller, Payload
from offbeat.service.wire.limits import WireLimits
from protocol import PROTOBUF, datum, finished, model_of, pass_body, sample_body, session_of
from sampler_world import CHECKPOINT, PATH, World
from waiting import until

ALICE, BOB = "tml-alice-0123456789", "tml-bob-0123456789ab"
KEYS = f'[owners.alice]\nkey = "{ALICE}"\n[owners.bob]\nkey = "{BOB}"\n'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
FLAT, BLOCK = {"type": "function", "name": "add", "parameters": PARAMETERS}, {"name": "add", "input_schema": PARAMETERS}
USER = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
END = "<|im_end|>"
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER}, "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": USER, "max_tokens": 64000}, "/v1/messages/count_tokens": {"messages": USER}}


@dataclass
class Engines:
    """Writes the next of `texts` for each sample, once `gate` is open, and remembers how it was asked."""

    tokenizer: Tokenizer
    texts: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[str, tuple[int, ...], EngineSampling, int]] = field(default_factory=list)
    running: int = 0
    context: int = 4096
    error: Exception | None = None

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return (self.tokenizer.eos_token_id,)

    async def sample(self, adapter: str, prompt: tuple[int, ...], sampling: EngineSampling, n: int, session: str) -> list[Sample]:
        self.asked.append((adapter, prompt, sampling, n))
        self.running += n
        try:
            await self.gate.wait()
        finally:
            self.running -= n
        if self.error is not None:
            raise self.error
        return [self._sample(self.texts.pop(0) if self.texts else "ok" + END) for _ in range(n)]

    def _sample(self, text: str) -> Sample:
        ids = tuple(self.tokenizer.encode(text))
        return Sample(ids, (-0.5,) * len(ids), (0,) * len(ids), "", "stop")

    async def score(self, *_: Any) -> Any:
        raise AssertionError("chats ask nothing about their prompts")


@dataclass
class Scripted:
    """What a test's body is given."""

    client: Client
    engines: Engines
    sampling: SamplingService
    usage: Usage
    world: World
    registry: CollectorRegistry

    async def ask(self, path: str, *, key: str = "", headers: Mapping[str, str] | None = None, **body: Any) -> Answer:
        """Ask for the base model's answer as the clients of each API do."""
        asked = {"model": "base"} | ASKED[path] | body
        sent = {"authorization": f"Bearer {key or ALICE}"} if headers is None else headers
        return await replace(self.client, key="").ask("POST", path, asked, headers=sent)


def scripted(
    tmp_path: Path, body: Callable[[Scripted], Awaitable[None]], *, tokenizer: Tokenizer | None = None, max_queued_tokens: int = 10**6,
    max_requests_of_one: int = 3,
) -> None:
    tokenizer = tokenizer or words(CHATML)

    async def main(store: Store) -> None:
        world, engines = World(), Engines(tokenizer)
        engines.gate.set()
        usage = Usage(lambda _: Limits(max_queued_tokens=max_queued_tokens))
        futures = Futures(
            store, Results(tmp_path / "results"), encode=lambda _: Payload("text/plain", b""), owner_of=lambda _: None, usage=usage)
        samplers = Samplers(
            [], engines=world, base_models=world.base_models, store=store, usage=usage, sessions=world, checkpoints=world, timeout_s=60.0)
        sampling = SamplingService(samplers, engines=engines, futures=futures, usage=usage, max_in_flight=32)
        served = Served("base", "folder", 32.0, WireLimits(vocab_size=tokenizer.vocab_size, context=engines.context))
        (tmp_path / "keys.toml").write_text(KEYS)
        registry = CollectorRegistry()
        app = make_app(
            ChatRoutes(
                sampling, cast(Library, None), served, tokenizer=replace(tokenizer, name="base"), images=RequestImages(None)).endpoints, [],
            keys=Keys.load(tmp_path / "keys.toml"), bodies=Bodies(2**23), journal=Journal(registry),
            max_requests_of_one=max_requests_of_one)
        try:
            async with serving(app) as client:
                await body(Scripted(client, engines, sampling, usage, world, registry))
        finally:
            await sampling.close()

    with closing(Store.open(f"sqlite:///{tmp_path / 'db'}")) as store:
        asyncio.run(asyncio.wait_for(main(store), 60))


def error_of(answer: Answer) -> str:
    """The sentence of an error, which is in the form that clients of both APIs read."""
    error = answer.json["error"]
    assert "\n" not in error["message"] and error["type"], answer.body
    return error["message"]


def events(answer: Answer) -> list[Any]:
    assert answer.status == 200 and answer.headers["content-type"] == "text/event-stream", answer.body
    return [json.loads(line[6:]) for line in answer.body.decode().split("\n") if line.startswith("data: {")]


# -- dialects ------------------------------------------------------------------------------------------------------------------------------


def test_a_call_of_a_tool_is_told_in_each_dialect_and_its_result_comes_back(tmp_path: Path) -> None:
    async def body(world: Scripted) -> None:
        world.engines.texts = [CALL + END] * 3 + ["it is 3" + END]
        told = (await world.ask("/v1/chat/completions", tools=[TOOL])).json
        message = told["choices"][0]["message"]
        assert told["model"] == "base" and told["choices"][0]["finish_reason"] == "tool_calls" and message["content"] is None
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        (item,) = (await world.ask("/v1/responses", tools=[FLAT])).json["output"]
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "add", '{"a": 1}')
        told = (await world.ask("/v1/messages", tools=[BLOCK], headers={"x-api-key": ALICE})).json
        (block,) = told["content"]
        assert told["stop_reason"] == "tool_use" and block["input"] == {"a": 1}
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "no b", "is_error": True}
        messages = [*USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        told = (await world.ask("/v1/messages", tools=[BLOCK], messages=messages)).json
        assert told["content"] == [{"type": "text", "text": "it is 3"}]
        assert "Error: no b" in world.engines.tokenizer.decode(world.engines.asked[-1][1])
        counted = await world.ask("/v1/messages/count_tokens", tools=[BLOCK], messages=messages)
        assert counted.json == {"input_tokens": told["usage"]["input_tokens"]} == {"input_tokens": len(world.engines.asked[-1][1])}

    scripted(tmp_path, body)


def test_settings_reach_the_engines_as_those_of_asample_do(tmp_path: Path) -> None:
    async def body(world: Scripted) -> None:
        answer = await world.ask(
            "/v1/chat/completions", n=2, max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=5, stop=["x", "<|im_start|>"],
            logprobs=True, return_token_ids=True, ignore_eos=True, presence_penalty=0.5)
        ((adapter, prompt, sampling, n),) = world.engines.asked
        start = world.engines.tokenizer.special_tokens.get("<|im_start|>")
        assert (adapter, n, answer.json["prompt_token_ids"]) == ("", 2, list(prompt))
        assert sampling == EngineSampling(
            7, temperature=0.5, top_p=0.9, top_k=3, stop=("x",), seed=5, stop_token_ids=(start,), ignore_eos=True, scaled_logprobs=True,
            shaping=Shaping(presence_penalty=0.5))
        first, _ = answer.json["choices"]
        assert first["message"]["content"] == "ok" and first["token_ids"] == world.engines.tokenizer.encode("ok" + END)
        assert [entry["logprob"] for entry in first["logprobs"]["content"]] == [-0.5] * 3 and first["versions"] == [0] * 3
        assert answer.json["usage"]["completion_tokens"] == 6
        await world.ask("/v1/messages")
        assert world.engines.asked[-1][2].max_new_tokens == 4096 - len(world.engines.asked[-1][1])
        forced = await world.ask("/v1/responses", tools=[FLAT], tool_choice="required", parallel_tool_calls=False)
        assert world.engines.asked[-1][2].stop == ("</tool_call>",) and forced.status == 200
        assert world.engines.tokenizer.decode(world.engines.asked[-1][1]).endswith('"add", "arguments": ')

    scripted(tmp_path, body)


def test_streams_are_whole_and_show_life_while_they_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = sending.ChatResponse.__init__.__kwdefaults__
    monkeypatch.setitem(cast(dict[str, Any], defaults), "keep_alive_s", 0.02)

    async def body(world: Scripted) -> None:
        world.engines.texts = [CALL + END] * 3
        world.engines.gate.clear()
        asked = [asyncio.create_task(world.ask(path, stream=True, tools=tools)) for path, tools in (
            ("/v1/chat/completions", [TOOL]), ("/v1/responses", [FLAT]), ("/v1/messages", [BLOCK]))]
        await until(lambda: world.engines.running == 3)
        await asyncio.sleep(0.06)
        world.engines.gate.set()
        chat, responses, messages = await asyncio.gather(*asked)
        assert chat.body.startswith(b": keep-alive") and messages.body.startswith(b"event: ping")
        assert len(chat.headers["x-request-id"]) == 12 and chat.body.endswith(b"data: [DONE]\n\n")
        deltas = [event["choices"][0]["delta"] for event in events(chat)]
        assert "".join(d["tool_calls"][0]["function"]["arguments"] for d in deltas if "tool_calls" in d) == '{"a": 1}'
        assert events(responses)[-1]["type"] == "response.completed" and events(messages)[-2]["delta"]["stop_reason"] == "tool_use"

    scripted(tmp_path, body)


# -- errors --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "change", "status", "told"), [
    ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, 400, "response_format of type 'json_schema' needs a schema"),
    ("/v1/chat/completions", {"scaled_logprobs": True}, 400, "scaled_logprobs is not honoured"),
    ("/v1/chat/completions", {"top_logprobs": 257}, 422, "top_logprobs must be"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages is empty"),
    ("/v1/chat/completions", {"n": 5000}, 422, "n must be"),
    ("/v1/chat/completions", {"stop": [*map(str, range(65))]}, 422, "stop"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 4096}]}, 422, "the chat must have 1 to 4096 tokens, got 4"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 2**22}]}, 413, "the body is larger than 4194304 bytes"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]}]}, 400, "this model reads text alone here; send text"),
    ("/v1/responses", {"previous_response_id": "r"}, 400, "previous_response_id is not honoured"),
    ("/v1/responses", {"temperature": -1}, 422, "temperature must be"),
    ("/v1/messages", {"top_p": 0}, 422, "top_p must be"),
    ("/v1/messages", {"stop_sequences": [""]}, 422, "stop[0] must be"),
    ("/v1/messages", {"model": "other"}, 404, "there is no model 'other' here"),
    ("/v1/messages/count_tokens", {"model": "other"}, 404, "there is no model 'other' here"),
])
def test_what_cannot_be_done_is_one_sentence_in_the_dialect(
    tmp_path: Path, path: str, change: dict[str, Any], status: int, told: str,
) -> None:
    async def body(world: Scripted) -> None:
        answer = await world.ask(path, **change)
        assert answer.status == status and told in error_of(answer), answer.body
        assert ("type" in answer.json) == path.startswith("/v1/messages") and not world.engines.asked

    scripted(tmp_path, body)


@pytest.mark.parametrize("path", ASKED)
def test_a_model_of_another_owner_does_not_exist_and_a_key_is_needed(tmp_path: Path, path: str) -> None:
    async def body(world: Scripted) -> None:
        assert (await world.ask(path, model=PATH)).status == 200
        mine = (await world.sampling.samplers.of_model(Caller("alice"), PATH)).id
        assert (await world.ask(path, model=mine)).status == 200
        said = set()
        for model in (PATH, mine, PATH.replace("one", "two"), mine.replace(":0", ":7")):
            answer = await world.ask(path, key=BOB, model=model)
            assert answer.status == 404
            said.add(error_of(answer).replace(model, "MODEL"))
        assert len(said) == 1
        for headers in ({}, {"x-api-key": "tml-mallory"}, {"authorization": "Bearer sk-1"}):
            answer = await world.ask(path, headers=headers)
            assert answer.status == 401 and "TINKER_API_KEY" in error_of(answer)

    scripted(tmp_path, body)


def test_engines_that_fail_and_queues_that_are_full_are_told_so_that_clients_come_again(tmp_path: Path) -> None:
    async def body(world: Scripted) -> None:
        world.engines.error = RuntimeError("secret")
        for path in list(ASKED)[:3]:
            answer = await world.ask(path, stream=True, **{"max_output_tokens" if path == "/v1/responses" else "max_tokens": 9})
            assert answer.status == 503 and "secret" not in error_of(answer) and answer.headers["content-type"] == "application/json"
        full = await world.ask("/v1/chat/completions", max_tokens=4000)
        assert full.status == 413 and "you may have at most 3000 under way" in error_of(full)
        world.engines.error = None
        world.engines.gate.clear()
        waiting = asyncio.create_task(world.ask("/v1/messages", max_tokens=2900))
        await until(lambda: world.engines.running == 1)
        busy = await world.ask("/v1/messages", max_tokens=2000)
        assert busy.status == 429 and busy.json["error"]["type"] == "rate_limit_error" and busy.headers["retry-after"] == "1"
        world.engines.gate.set()
        assert (await waiting).status == 200 and world.usage.of("alice").queued_tokens == 0

    scripted(tmp_path, body, max_queued_tokens=3000)


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    async def body(world: Scripted) -> None:
        answer = await world.ask("/v1/chat/completions")
        assert answer.status == 400 and error_of(answer) == (
            "the model 'base' has no chat template, so it cannot be asked in chats; use the SDK")

    scripted(tmp_path, body, tokenizer=words(None))


# -- fairness ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_samples_and_its_place(tmp_path: Path, stream: bool) -> None:
    async def body(world: Scripted) -> None:
        world.engines.gate.clear()
        asked = [asyncio.create_task(world.ask("/v1/messages", stream=stream)) for _ in range(3)]
        await until(lambda: world.engines.running == 3)
        fourth = await world.ask("/v1/messages")
        assert fourth.status == 429 and "requests under way" in error_of(fourth), "each counts for as long as it waits"
        assert (await world.ask("/v1/messages", key=BOB, max_tokens=0)).status == 422, "others have places of their own"
        for one in asked:
            one.cancel()
        await until(lambda: not world.engines.running and not world.usage.of("alice").queued_tokens and not world.sampling.standing().jobs)
        gone = {"endpoint": "/v1/messages", "status": "499"}
        await until(lambda: world.registry.get_sample_value("offbeat_http_requests_total", gone) == 3)
        world.engines.gate.set()
        assert (await world.ask("/v1/messages")).status == 200

    scripted(tmp_path, body)


def test_the_weights_that_a_path_has_now_are_asked(tmp_path: Path) -> None:
    async def body(world: Scripted) -> None:
        for path in (PATH, PATH):
            assert (await world.ask("/v1/responses", model=path)).json["model"] == PATH
        world.world.checkpoints[PATH] = replace(CHECKPOINT, folder="folder-two", version=4)
        answer = await world.ask("/v1/chat/completions", model=PATH, return_token_ids=True)
        assert [adapter for adapter, *_ in world.engines.asked] == ["t.folder-one@3"] * 2 + ["t.folder-two@3"]
        assert answer.json["choices"][0]["versions"] == [4] * 3
        assert world.usage.of("alice").samplers == 2

    scripted(tmp_path, body)


# -- the whole service ---------------------------------------------------------------------------------------------------------------------


def test_owners_ask_what_they_have_trained_and_nobody_elses(serve: Serve) -> None:
    async def body(client: Client) -> None:
        session = await session_of(client)
        model = await model_of(client, session)
        prompt = [13, 14, 15, 9]
        await client.post("forward_backward", pass_body(model, 1, [datum(prompt)]), headers=PROTOBUF)
        await finished(client, await client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}))
        saved = await finished(client, await client.post("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "one"}))
        path = saved["path"]
        listed = (await client.ask("GET", "/v1/models")).json
        assert [entry["id"] for entry in listed["data"]] == ["org/small", path] and listed["last_id"] == path
        assert [e["id"] for e in (await client.of("tml-bob").ask("GET", "/v1/models")).json["data"]] == ["org/small"]

        async def chat(model: str, **more: Any) -> Any:
            asked = {"model": model, "messages": [{"role": "user", "content": "12"}], "max_tokens": 6, "temperature": 0} | more
            return (await client.ask("POST", "/v1/chat/completions", asked | {"return_token_ids": True, "logprobs": True})).json

        base, trained = await chat("org/small"), await chat(path)
        assert base["prompt_token_ids"] == trained["prompt_token_ids"]
        sampler = (await client.post("create_sampling_session", {
            "session_id": session, "sampling_session_seq_id": 1, "model_path": path})).json["sampling_session_id"]
        asked = sample_body(sampler, 0, trained["prompt_token_ids"], max_tokens=6, temperature=0)
        (sequence,) = (await finished(client, await client.post("asample", asked)))["sequences"]
        (choice,) = trained["choices"]
        assert choice["token_ids"] == np.frombuffer(sequence["tokens"], "<i4").tolist()
        told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        np.testing.assert_allclose(told, np.frombuffer(sequence["logprobs"], "<f4"), atol=1e-5)
        assert [e["logprob"] for e in base["choices"][0]["logprobs"]["content"]] != pytest.approx(told, abs=1e-3), "other weights"
        assert (await chat(sampler))["choices"][0]["token_ids"] == choice["token_ids"]
        seeded = [await chat(path, n=2, seed=7, temperature=1) for _ in range(2)]
        assert [c["token_ids"] for c in seeded[0]["choices"]] == [c["token_ids"] for c in seeded[1]["choices"]]
        for stranger in (path, sampler):
            refused = await client.of("tml-bob").ask("POST", "/v1/messages", {
                "model": stranger, "messages": [{"role": "user", "content": "12"}], "max_tokens": 1})
            assert refused.status == 404 and refused.json["error"]["type"] == "not_found_error"
        run = f"training_runs/{model}/checkpoints/sampler_weights/one"
        assert (await client.ask("DELETE", f"/api/v1/{run}")).status == 204
        assert "there is no model" in (await chat(path))["error"]["message"]

    serve(body)


def test_the_hosted_services_paths_answer_as_ours_do(tmp_path: Path) -> None:
    vendors = {"/v1/chat/completions": "/oai/api", "/v1/messages": "/anthropic/api", "/v1/messages/count_tokens": "/anthropic/api"}

    async def body(world: Scripted) -> None:
        for path, before in vendors.items():
            asked, sent = {"model": "base"} | ASKED[path], {"authorization": f"Bearer {ALICE}"}
            ours, theirs = [await replace(world.client, key="").ask("POST", at, asked, headers=sent) for at in (path, before + path)]
            assert theirs.status == ours.status == 200
            assert {**theirs.json, "id": "", "created": 0} == {**ours.json, "id": "", "created": 0}
            wrong = await replace(world.client, key="").ask("POST", before + path, asked, headers={})
            assert wrong.status == 401 and error_of(wrong)

    scripted(tmp_path, body)
