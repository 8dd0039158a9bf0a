"""The engine's endpoints for completions: OpenAI's, and /v1/running, which tells what running ones have so far. Used by `server`."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from offbeat.chat.dialects import read_body
from offbeat.chat.refusals import json_response
from offbeat.chat.size import check_text_size
from offbeat.engine.answers import Answer, CompletionFormat, Prompt, array_bytes
from offbeat.engine.chats import streaming
from offbeat.engine.loop import EngineLoop
from offbeat.engine.request import MAX_PROMPT_TOP, FinishReason, Output, Request, SamplingParams, Scored, ScoreJob
from offbeat.engine.sample_ends import has_ended
from offbeat.engine.served_models import ServedModels
from offbeat.engine.submissions import Submissions, next_message
from offbeat.engine.web import Handler, whole_body
from offbeat.engine.wire import CompletionBody, RunningBody, read_completion
from offbeat.errors import RefusedError
from offbeat.listening import decode_body

DEFAULT_MAX_TOKENS = 16


class CompletionEndpoints:
    """Answers completions with an engine."""

    def __init__(self, loop: EngineLoop, submissions: Submissions, models: ServedModels, *, max_queued: int) -> None:
        self._loop = loop
        self._engine = loop.engine
        self._tokenizer = loop.engine.tokenizer
        self._submissions = submissions
        self._models = models
        self._max_queued = max_queued

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each endpoint."""
        return [("POST", "/v1/completions", self._completions), ("POST", "/v1/running", self._running)]

    async def _completions(self, http: HttpRequest) -> Response:
        body = await decode_body(read_completion, await whole_body(http))
        prompts = await self._prompts(body)
        ended = self._ended(body, prompts[0]) if body.begun_tokens else None
        generates = ended is None and not (body.echo and body.max_tokens == 0)
        params = body.params(default_max_tokens=DEFAULT_MAX_TOKENS) if generates else SamplingParams()
        form, adapter = CompletionFormat(packed=body.encoding_format == "base64"), self._models.adapter_of(body.model or "")
        name = f"{form.prefix}-{body.request_id or uuid.uuid4().hex}"
        if _first_id(name) in self._submissions:
            raise RefusedError(f"request_id {body.request_id!r} is that of a request that runs; give each one its own")
        requests = [
            Request(id=f"{name}-{index}", prompt=prompt, params=params, n=body.n, adapter=adapter, stream=body.stream,
                    num_begun=body.begun_tokens)
            for index, prompt in enumerate(prompts)]
        scores = await self._prompt_scores(http, body, prompts, adapter)
        answer = Answer(
            name, form, body, tokenizer=self._tokenizer, model=adapter or self._models.own_name, prompt_len=sum(map(len, prompts)),
            prompts=[Prompt(*prompt) for prompt in zip(prompts, body.prompts, scores, strict=True)])
        outputs = (self._submissions.outputs(http, *requests) if generates else _empty_samples(len(prompts) * body.n, ended or "length"))
        if body.stream:
            return await streaming(answer, outputs)
        made = [output async for output in outputs]
        # A long prompt's log-probabilities take a second to write.
        return json_response(await asyncio.to_thread(answer.whole, made) if any(scores) else answer.whole(made))

    async def _prompts(self, body: CompletionBody) -> list[list[int]]:
        if len(given := body.prompts) > self._max_queued:
            raise RefusedError(f"prompt takes at most {self._max_queued} prompts here, got {len(given)}; send several requests")
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        for text in texts:
            check_text_size(text, self._tokenizer, context=self._engine.max_context)
        tokenized = iter(await asyncio.to_thread(lambda: list(map(self._tokenizer.prompt, texts)))) if texts else iter(())
        return [next(tokenized) if isinstance(prompt, str) else prompt for prompt in given]

    def _ended(self, body: CompletionBody, prompt: list[int]) -> FinishReason | None:
        """Return why the sample that a request is to go on with has ended already, so that its end is not drawn a second time."""
        # Without its limit, which is 0 where the sample has all of its tokens already.
        params = msgspec.structs.replace(body, max_tokens=None).params(default_max_tokens=self._engine.max_context)
        if has_ended(params, self._tokenizer, prompt[-body.begun_tokens :]):
            return "stop"
        return "length" if body.max_tokens == 0 else None

    async def _prompt_scores(
        self, http: HttpRequest, body: CompletionBody, prompts: Sequence[list[int]], adapter: str
    ) -> list[Scored | None]:
        """Score the prompts whose log-probabilities are wanted; None where they are not, and for a prompt of one token."""
        scores: list[Scored | None] = [None] * len(prompts)
        if (top_k := body.prompt_top) is None:
            return scores
        if not 0 <= top_k <= MAX_PROMPT_TOP:
            raise RefusedError(f"logprobs and prompt_logprobs of a prompt must be 0 to {MAX_PROMPT_TOP} likeliest tokens, got {top_k}")
        places = [at for at, prompt in enumerate(prompts) if len(prompt) > 1]
        jobs = [ScoreJob(id=f"score-{uuid.uuid4().hex}", tokens=prompts[at], top_k=top_k, adapter=adapter) for at in places]
        if jobs:
            async with self._submissions.submitted(http, *jobs) as inbox:
                for _ in jobs:  # they share forward passes, and come in any order
                    scored = await next_message(inbox, Scored)
                    scores[places[scored.index]] = scored
        return scores

    async def _running(self, http: HttpRequest) -> Response:
        body = read_body(RunningBody, await whole_body(http))
        ids = {name: _first_id(f"{CompletionFormat.prefix}-{name}") for name in body.requests}
        have = {ids[name]: firsts for name, firsts in body.requests.items()}
        running = await asyncio.wrap_future(self._loop.call(lambda: self._engine.running(have)))
        told = complete_requests(have, running, {request_id: self._submissions.ended(request_id) for request_id in have})
        return json_response(write_running(body.requests, {name: told[ids[name]] for name in ids if ids[name] in told}))


def _first_id(name: str) -> str:
    """Return the id of the request for the first prompt of a body, such as "cmpl-r1-0"."""
    return f"{name}-0"


async def _empty_samples(num: int, reason: FinishReason) -> AsyncGenerator[Output]:
    """Yield samples of no tokens, for prompts that are told again and not continued."""
    for index in range(num):
        yield Output(index, [], [], [], reason, [])


def complete_requests(
    have: Mapping[str, Sequence[int]], running: Mapping[str, Sequence[Output]], ended: Mapping[str, Sequence[Output]],
) -> dict[str, list[Output]]:
    """Return all samples of each request, in order, with the tokens that their client lacks; not requests of which a sample is missing.

    Args:
        have: tokens of each sample that the client has, by request, such as {"r1": [0, 3]}. A request may have more samples than those.
        running: what the running samples have beyond that; see `Rows.running`.
        ended: whole samples that have ended.
    """
    told: dict[str, list[Output]] = {}
    for name, firsts in have.items():
        samples = {output.index: output for output in running.get(name, ())}
        samples |= {output.index: _after(output, firsts[output.index]) for output in ended.get(name, ()) if output.index < len(firsts)}
        if samples.keys() == set(range(len(firsts))):
            told[name] = [samples[index] for index in range(len(firsts))]
    return told


def _after(output: Output, first: int) -> Output:
    return replace(output, token_ids=output.token_ids[first:], logprobs=output.logprobs[first:], versions=output.versions[first:])


def write_running(have: Mapping[str, Sequence[int]], told: Mapping[str, Sequence[Output]]) -> bytes:
    """Answer /v1/running: for each request's samples the tokens before and after, from which a client goes on when an engine has died."""
    return msgspec.json.encode({"requests": {name: [{
        "first": first, "token_ids": array_bytes(output.token_ids, np.int32), "logprobs": array_bytes(output.logprobs, np.float32),
        "versions": array_bytes(output.versions, np.int32)} for first, output in zip(have[name], samples, strict=True)]
        for name, samples in told.items()}})
