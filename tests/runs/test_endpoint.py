"""Endpoints by URL, played by an application that answers as the test says."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from http_serving import serving
from offbeat.config.load import load_config
from offbeat.config.root import Config
from offbeat.data.reward import FailedReward, NamedReward
from offbeat.data.row import Row
from offbeat.errors import ConfigError, EngineError, RolloutError
from offbeat.evaluation.samples import EvaluatedSample, EvaluatedSet
from offbeat.runs.endpoint import AskedSet, ModelEndpoint, read_sets
from offbeat.runs.evaluated_model import EvaluatedModel
from small_run import REWARDS, small_config

CHAT = ({"role": "user", "content": "3 + 4?"},)


class Scripted:
    """Answers each prompt with itself, after the statuses that the test gives for it."""

    def __init__(self, *, models: tuple[str, ...] = ("m",), most: int = 8, statuses: dict[str, list[int]] | None = None) -> None:
        self.models, self.most, self.statuses = models, most, statuses or {}
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.app = Starlette(routes=[
            Route("/v1/models", self.list), Route("/v1/completions", self.answer, methods=["POST"]),
            Route("/v1/chat/completions", self.answer, methods=["POST"])])

    async def list(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": name} for name in self.models]})

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append((request.url.path, request.headers.get("authorization", ""), body))
        text = body.get("prompt") or body["messages"][-1]["content"]
        if left := self.statuses.get(text):
            return JSONResponse({"error": "not now"}, left.pop(0), headers={"Retry-After": "0"})
        said = [f"{text} {number}" for number in range(min(body.get("n", 1), self.most))]
        as_chat = "messages" in body
        choices = [{"message": {"content": each}, "finish_reason": "length"} if as_chat else {"text": each, "finish_reason": "stop"}
                   for each in said]
        return JSONResponse({"choices": choices, "usage": {"completion_tokens": 3}})


class Rewards:
    """Right is what ends in 0; nothing can be said of what ends in 1."""

    async def score(self, completions: list[str], row: Row) -> list[float]:
        return [NamedReward({"right": 1.0}) if text.endswith("0") else FailedReward("odd") if text.endswith("1") else 0.5
                for text in completions]


def configured(tmp_path: Path, **changes: str) -> Config:
    return small_config(tmp_path, rollout__max_retries="1", **changes)


def play(scripted: Scripted, config: Config, *rows: Row, served: str = "") -> EvaluatedSet:
    """The set of these rows, asked for over HTTP."""
    async def main(endpoint: ModelEndpoint) -> EvaluatedSet:
        return await endpoint.play(AskedSet("", config, rows), Rewards(), on_prompt=lambda *counts: told.append(counts))

    told: list[tuple[int, int]] = []
    answered = connected(scripted, main, served=served)
    assert sorted(told) == sorted((sum(each.is_right for each in own.samples), len(own.samples)) for own in answered.prompts)
    return answered


def connected(scripted: Scripted, main: Callable[[ModelEndpoint], Awaitable[Any]], *, served: str = "") -> Any:
    @asynccontextmanager
    async def endpoint():
        async with serving(scripted.app) as client, aiohttp.ClientSession() as http:
            yield await ModelEndpoint.connect(http, EvaluatedModel("e", url=client.url, served=served), key_env="OFFBEAT_TEST_KEY")

    async def run() -> Any:
        async with endpoint() as found:
            return await main(found)

    return asyncio.run(run())


def test_texts_and_chats_are_asked_with_the_settings_of_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_TEST_KEY", "secret")
    config = configured(tmp_path, evaluate__temperature="0.5", rollout__top_p="0.9", rollout__stop='["\\n"]')
    scripted = Scripted()
    answered = play(scripted, config, Row("31>", "13"), Row(CHAT, "7"))
    assert [prompt.samples for prompt in answered.prompts] == [
        (EvaluatedSample("31> 0", 1.0, "stop", 3, {"right": 1.0}),), (EvaluatedSample("3 + 4? 0", 1.0, "length", 3, {"right": 1.0}),)]
    bodies = {path: (key, body) for path, key, body in scripted.asked}
    own = {"model": "m", "temperature": 0.5, "max_tokens": 5, "top_p": 0.9, "stop": ["\n"]}
    assert bodies["/v1/completions"] == ("Bearer secret", own | {"prompt": "31>"})
    assert bodies["/v1/chat/completions"] == ("Bearer secret", own | {"messages": list(CHAT)})


def test_calls_of_tools_are_sent_as_endpoints_take_them(tmp_path: Path) -> None:
    add, flat = {"type": "function", "function": {"name": "add", "arguments": {"a": "ü", "b": 4}}}, {"name": "now", "id": "mine"}
    chat = [
        {"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [add, flat], "weight": 0, "lang": "de"},
        {"role": "tool", "content": "7"}, {"role": "tool", "content": "noon", "tool_call_id": "mine"}, {"role": "user", "content": "so?"}]
    scripted = Scripted()
    play(scripted, configured(tmp_path), Row(tuple(chat), "7"))
    ((_, _, body),) = scripted.asked
    assert body["messages"] == [
        chat[0],
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": "ü", "b": 4}'}},
            {"id": "mine", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
        {"role": "tool", "content": "7", "tool_call_id": "call_0"}, chat[3], chat[4]]
    assert add["function"]["arguments"] == {"a": "ü", "b": 4}, "the row stays as it is"


def test_several_answers_are_asked_for_until_they_are_there_and_each_is_scored(tmp_path: Path) -> None:
    config = configured(tmp_path, evaluate__temperature="1", evaluate__samples_per_prompt="5", evaluate__pass_at="[2]")
    scripted = Scripted(most=3)
    answered = play(scripted, config, Row("31>", "13"))
    assert [body.get("n") for _, _, body in scripted.asked] == [5, 2]
    [prompt] = answered.prompts
    assert [sample.text[-1] for sample in prompt.samples] == list("01201") and answered.pass_at == (2,)
    assert [sample.reward for sample in prompt.samples] == [1.0, None, 0.5, 1.0, None]
    assert prompt.samples[1] == EvaluatedSample("31> 1", None, "reward failed: odd")


def test_a_busy_endpoint_is_asked_again_and_a_prompt_that_fails_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.runs.endpoint.PAUSE_S", 0.0)
    scripted = Scripted(statuses={"busy": [503], "away": [429, 429], "wrong": [400]})
    answered = play(scripted, configured(tmp_path), *(Row(text, "") for text in ("busy", "away", "wrong", "fine")))
    assert [prompt.failed for prompt in answered.prompts] == [False, True, True, False]
    assert "answered with 429" in answered.prompts[1].failure and "answered with 400" in answered.prompts[2].failure
    assert sum(body["prompt"] == "wrong" for _, _, body in scripted.asked) == 1, "what is refused is not asked again"
    assert all(body["top_p"] == 1.0 for _, _, body in scripted.asked), "what is not named may be the endpoint's own default"
    with pytest.raises(RolloutError, match="none of 1 held-out prompts could be evaluated; the first because of .*answered with 401"):
        play(Scripted(statuses={"x": [401]}), configured(tmp_path), Row("x", ""))


def test_the_model_is_the_only_one_or_it_is_named(tmp_path: Path) -> None:
    async def model(endpoint: ModelEndpoint) -> str:
        return endpoint.model

    assert connected(Scripted(models=("only",)), model) == "only"
    assert connected(Scripted(models=("a", "b")), model, served="b") == "b"
    with pytest.raises(ConfigError, match=r"has 'a', 'b'; name one of them after a '#', as http://.*#MODEL"):
        connected(Scripted(models=("a", "b")), model)
    with pytest.raises(ConfigError, match="is not the URL of an endpoint"):
        asyncio.run(ModelEndpoint.connect(None, EvaluatedModel("x", url="http://"), key_env=""))

    async def nobody() -> None:
        async with aiohttp.ClientSession() as http:
            await ModelEndpoint.connect(http, EvaluatedModel("x", url="http://127.0.0.1:9"), key_env="")

    with pytest.raises(EngineError, match="cannot be reached"):
        asyncio.run(nobody())


def test_sets_are_read_without_a_tokenizer_and_only_single_turns_can_be_asked(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}>", "answer": "a"}) + "\n" for i in range(3)))
    config = configured(
        tmp_path, evaluate__sets__own__data__path=str(rows), evaluate__sets__own__num_prompts="2",
        evaluate__sets__own__rollout__reward=f"{REWARDS}:right")
    held_out, own = read_sets(config)
    assert (held_out.name, len(held_out.rows), own.name) == ("", 4, "own")
    assert [row.prompt for row in own.rows] == ["0>", "1>"] and own.config.rollout.reward.endswith(":right")
    playing = config.model_copy(update={"rollout": config.rollout.model_copy(update={"workflow": "mine:play"})})
    with pytest.raises(ConfigError, match=r"rollout\.workflow must be left out to evaluate a model by URL, got 'mine:play'"):
        read_sets(playing)


def test_what_only_a_chat_template_here_could_write_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    chat = {"messages": list(CHAT), "answer": "7", "tools": [{"type": "function", "function": {"name": "add"}}]}
    rows.write_text("".join(json.dumps(chat) + "\n" for _ in range(3)))
    config = configured(tmp_path, evaluate__sets__own__data__path=str(rows))
    with pytest.raises(ConfigError, match=r"the column 'tools' of evaluate\.sets\.own\.data\.path cannot be given to a model by URL"):
        read_sets(config)
    with pytest.raises(ConfigError, match=r"^data\.chat_template_kwargs cannot be given to a model by URL"):
        read_sets(configured(tmp_path, data__chat_template_kwargs="{enable_thinking = false}", data__chat_template="true"))
    assert read_sets(configured(tmp_path, data__chat_template_kwargs="{enable_thinking = false}")), "plain prompts need no template"


def test_several_data_sets_are_refused_and_evaluation_sets_of_their_own_are_not(tmp_path: Path) -> None:
    config = load_config(None, values={
        "data": {"sets": {"a": {"task": "addition"}}}, "evaluate.sets.own.data.task": "sort_digits", "evaluate.sets.own.num_prompts": 2})
    with pytest.raises(ConfigError, match=r"data\.sets cannot be evaluated by URL"):
        read_sets(config)
    with_none = load_config(None, values=config.model_dump() | {"data": config.data.model_dump() | {"heldout_size": 0}})
    assert [(each.name, len(each.rows)) for each in read_sets(with_none)] == [("own", 2)]


def test_an_answer_that_is_no_text_fails_its_prompt_alone(tmp_path: Path) -> None:
    class Rubbish(Scripted):
        async def answer(self, request: Request) -> Response:
            body = await request.json()
            return Response(b'{"choices": "\xff"}') if body["prompt"] == "bad" else await super().answer(request)

    answered = play(Rubbish(), configured(tmp_path), Row("bad", ""), Row("good", ""))
    assert "something that is not JSON" in answered.prompts[0].failure and not answered.prompts[1].failed


def test_images_are_not_left_out_of_what_a_model_by_url_is_asked(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "<image>how many?", "images": ["a.png"], "answer": "7"}) + "\n")
    with pytest.raises(ConfigError, match=r"^evaluate\.sets\.own\.data\.path has images, which are not sent to a model by URL"):
        read_sets(configured(tmp_path, evaluate__sets__own__data__path=str(rows)))
