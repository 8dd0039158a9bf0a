"""Answers evaluation sets over an OpenAI-style endpoint: `offbeat engine`, `offbeat serve`, any other server of models. Torch-free.

Prompts go to /completions as text, or to /chat/completions if they are chats or `data.chat_template` is on, and answers are text. So no
tokenizer is needed, and the answers cannot be trained on.
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from offbeat.aio import deadline, gather_all
from offbeat.config.root import Config
from offbeat.controller.evaluate import OnPrompt
from offbeat.data.dataset import ListDataset, PromptDataset, open_datasets
from offbeat.data.evaluation_set import open_set
from offbeat.data.prompt import messages_of
from offbeat.data.reward import FailedReward, NamedReward
from offbeat.data.row import Row
from offbeat.errors import ConfigError, EngineError, OffbeatError, describe, printable
from offbeat.evaluation.samples import EvaluatedPrompt, EvaluatedSample, EvaluatedSet, check_answered
from offbeat.rollout.judges import AGAIN, LONGEST_PAUSE_S, PAUSE_S
from offbeat.rollout.reward_pool import Rewards
from offbeat.runs.evaluated_model import EvaluatedModel

SINGLE_TURN = "offbeat.rollout.workflows.single_turn:single_turn"
_LIST_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class AskedSet:
    """A set to ask: its name, "" for the held-out prompts, its whole configuration and its rows."""

    name: str
    config: Config
    rows: tuple[Row, ...]


def read_sets(config: Config) -> list[AskedSet]:
    """Read the held-out prompts, if there are some, and the prompts of each evaluation set.

    Raises:
        ConfigError: a set is played in several turns, which text cannot record; or its prompts belong to several data sets, or need a chat
            template here, for example for tools.
        DataError: the data cannot be used.
    """
    if config.data.sets and config.data.heldout_size:
        raise ConfigError(
            "data.sets cannot be evaluated by URL, since each of its sets is asked and judged in a way of its own; give the model's folder,"
            " or set data.heldout_size to 0 and name evaluation sets (evaluate.sets) with a data.path of their own")
    heldout: PromptDataset = ListDataset(()) if config.data.sets else open_datasets(config.data, seed=config.run.seed)[1]
    found = [AskedSet("", config, _first(heldout, config.evaluate.num_prompts))] if heldout.num_rows else []
    for name in config.evaluate.sets:
        own = config.evaluation_set(name)
        rows = open_set(own.data, of_run=config.data, heldout=heldout, most=own.evaluate.num_prompts, seed=config.run.seed)
        found.append(AskedSet(name, own, _first(rows, own.evaluate.num_prompts)))
    for each in found:
        _check_askable(each)
    return found


def _check_askable(asked: AskedSet) -> None:
    """Refuse a set whose requests to an endpoint would differ from requests to engines."""
    where, data, workflow = f"evaluate.sets.{asked.name}." if asked.name else "", asked.config.data, asked.config.rollout.workflow
    if any(row.images for row in asked.rows):
        raise ConfigError(
            f"{where}data.path has images, which are not sent to a model by URL; give the model's folder, or rows without images")
    as_chats = any(messages_of(row, data) is not None for row in asked.rows)
    if any(row.tools for row in asked.rows) or (data.chat_template_kwargs and as_chats):
        what = f"{where}data.chat_template_kwargs" if data.chat_template_kwargs else f"the column 'tools' of {where}data.path"
        raise ConfigError(
            f"{what} cannot be given to a model by URL, whose own server writes its chats; give the model's folder, or --inference.urls if"
            " it is an engine that takes token ids")
    if workflow != SINGLE_TURN:
        raise ConfigError(
            f"{where}rollout.workflow must be left out to evaluate a model by URL, got {workflow!r}; an endpoint answers single prompts."
            " Give the model's folder, or --inference.urls if it is an engine that gives token ids")


def _first(rows: PromptDataset, most: int) -> tuple[Row, ...]:
    return tuple(rows.row(index) for index in range(min(most, rows.num_rows or 0)))


class ModelEndpoint:
    """An OpenAI-style endpoint, such as "http://localhost:8001/v1", and a model of it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, model: str, key: str) -> None:
        """See `connect`, which finds the model."""
        self._session = session
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.model = model

    @classmethod
    async def connect(cls, session: aiohttp.ClientSession, evaluated: EvaluatedModel, *, key_env: str) -> "ModelEndpoint":
        """Return the endpoint at a URL, to which /v1 is added where it has no path.

        Its key is in the environment variable `key_env`; none is sent where that is not set.

        Raises:
            ConfigError: the URL has no host; or no model is named, and the endpoint has not exactly one.
            EngineError, DeadlineError: it cannot be reached.
        """
        parts = urlsplit(evaluated.url)
        if not parts.hostname:
            raise ConfigError(f"{evaluated.url!r} is not the URL of an endpoint; give one such as http://localhost:8001/v1")
        url = evaluated.url.rstrip("/") if parts.path.strip("/") else f"{evaluated.url.rstrip('/')}/v1"
        endpoint = cls(session, url, model=evaluated.served, key=os.environ.get(key_env, ""))
        if not evaluated.served:
            async with deadline(f"the models of {url}", _LIST_TIMEOUT_S):
                listed = await endpoint._call("GET", "/models")
            names = [str(each["id"]) for each in _objects(listed.get("data"))]
            if len(names) != 1:
                raise ConfigError(
                    f"{url} has {', '.join(map(repr, names[:8])) or 'no models'}; name one of them after a '#', as {evaluated.url}#MODEL")
            endpoint.model = names[0]
        return endpoint

    async def play(self, asked: AskedSet, rewards: Rewards, *, on_prompt: OnPrompt) -> EvaluatedSet:
        """Ask all prompts of a set and score the answers.

        Raises:
            DeadlineError: it took longer than `evaluate.timeout_s`.
            RolloutError: not a single prompt could be scored; shows the first reason.
        """
        config = asked.config
        slots = asyncio.Semaphore(config.rollout.max_concurrent_rollouts)

        async def play(row: Row) -> EvaluatedPrompt:
            async with slots:
                prompt = await self._prompt(row, config, rewards)
            on_prompt(sum(sample.is_right for sample in prompt.samples), len(prompt.samples))
            return prompt

        async with deadline(f"evaluation of {asked.name}" if asked.name else "evaluation", config.timed_evaluate.timeout_s):
            prompts = await gather_all(play(row) for row in asked.rows)
        evaluate = config.evaluate
        return check_answered(EvaluatedSet(asked.name, evaluate.samples_per_prompt, tuple(prompts), evaluate.pass_at))

    async def _prompt(self, row: Row, config: Config, rewards: Rewards) -> EvaluatedPrompt:
        try:
            answers = await self._answers(row, config)
        except OffbeatError as exc:  # a prompt that fails is data
            return EvaluatedPrompt(row, failure=printable(describe(exc)))
        scored = await rewards.score([answer.text for answer in answers], row)
        return EvaluatedPrompt(row, tuple(_scored(answer, reward) for answer, reward in zip(answers, scored, strict=True)))

    async def _answers(self, row: Row, config: Config) -> list[EvaluatedSample]:
        """Return `evaluate.samples_per_prompt` answers; some endpoints give one per request, for any `n`."""
        rollout, wanted = config.rollout, config.evaluate.samples_per_prompt
        timeout_s = max(config.inference.request_timeout_s, config.inference.token_timeout_s * rollout.max_new_tokens)
        path, body = _request(row, config)
        answers: list[EvaluatedSample] = []
        while len(answers) < wanted:
            n = wanted - len(answers)
            async with deadline(f"an answer of {self._url}", timeout_s):
                told = await self._retrying(path, body | {"model": self.model} | ({"n": n} if n > 1 else {}), config.rollout.max_retries)
            choices = _objects(told.get("choices"))
            if not choices:
                raise EngineError(f"{self._url}{path} answered without choices: {printable(str(told), most=200)}")
            usage = told.get("usage")
            tokens = usage.get("completion_tokens") if isinstance(usage, dict) and len(choices) == 1 else None
            answers += [_read_choice(choice, tokens if isinstance(tokens, int) else 0) for choice in choices[:n]]
        return answers

    async def _retrying(self, path: str, body: Mapping[str, Any], num_retries: int) -> dict[str, Any]:
        for attempt in range(num_retries):
            try:
                return await self._call("POST", path, body)
            except EndpointBusy as exc:
                await asyncio.sleep(max(exc.wished_s, min(PAUSE_S * 2**attempt, LONGEST_PAUSE_S)))
        return await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            async with self._session.request(method, self._url + path, json=body, headers=self._headers) as response:
                data = await response.read()
        except aiohttp.ClientError as exc:
            raise EndpointBusy(f"{self._url} cannot be reached: {exc or type(exc).__name__}") from exc
        if response.status != 200:
            wished = response.headers.get("Retry-After", "")
            error = EndpointBusy if response.status in AGAIN else EngineError
            failure = error(f"{self._url}{path} answered with {response.status}: {printable(data.decode(errors='replace'), most=300)}")
            if isinstance(failure, EndpointBusy) and wished.isdigit():
                failure.wished_s = float(wished)
            raise failure
        try:
            told = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise EngineError(f"{self._url}{path} answered with something that is not JSON") from exc
        return told if isinstance(told, dict) else {}


class EndpointBusy(EngineError):  # noqa: N818
    """The endpoint cannot be reached or is busy, and may answer later: after `wished_s` seconds, by its Retry-After header."""

    wished_s = 0.0


def _request(row: Row, config: Config) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request for answers to a row, without the model and the number of answers."""
    rollout = config.rollout
    # An omitted setting may get the endpoint's own default, such as the top_p of the model's generation_config.json.
    body: dict[str, Any] = {"temperature": config.evaluate.temperature, "max_tokens": rollout.max_new_tokens, "top_p": rollout.top_p}
    for name, value, usual in (
        ("top_k", rollout.top_k, 0), ("stop", list(rollout.stop), []),
        ("stop_token_ids", list(rollout.stop_token_ids), []),
    ):
        if value != usual:
            body[name] = value
    messages = messages_of(row, config.data)
    return ("/completions", body | {"prompt": row.prompt}) if messages is None else (
        "/chat/completions", body | {"messages": _sent(messages)})


_SENT_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of messages that endpoints know; others are for templates and training, and some endpoints refuse them."""


def _sent(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form of endpoints.

    There, arguments of calls are JSON text, and each call has an id, such as "call_0", that its result names; rows hold objects, as chat
    templates take them, and may leave ids out.
    """
    sent, unanswered, number = [], [], 0
    for given in messages:
        message = {key: value for key, value in given.items() if key in _SENT_KEYS}
        if calls := message.get("tool_calls"):
            named = [_call(call, f"call_{number + at}") for at, call in enumerate(calls)]
            number += len(calls)
            message["tool_calls"], unanswered = named, [call["id"] for call in named]
        if message["role"] == "tool" and unanswered:
            answered = message.setdefault("tool_call_id", unanswered[0])
            unanswered = [call_id for call_id in unanswered if call_id != answered]
        sent.append(message)
    return sent


def _call(call: Mapping[str, Any], free_id: str) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call.get("id") or free_id, "type": "function", "function": {"name": function["name"], "arguments": text}}


def _read_choice(choice: Mapping[str, Any], num_tokens: int) -> EvaluatedSample:
    """Return a choice as an answer that has no reward yet."""
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    reason = choice.get("finish_reason")
    return EvaluatedSample(text if isinstance(text, str) else "", None, reason if isinstance(reason, str) else "stop", num_tokens)


def _scored(answer: EvaluatedSample, reward: float) -> EvaluatedSample:
    if isinstance(reward, FailedReward):
        return EvaluatedSample(answer.text, None, printable(f"reward failed: {reward.reason}"), answer.num_tokens)
    parts = reward.parts if isinstance(reward, NamedReward) else {}
    return EvaluatedSample(answer.text, float(reward), answer.reason, answer.num_tokens, parts)


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
