"""POST /v1/completions: an owner's samplers and the base model continue texts and token ids, for clients of OpenAI's API.

Every prompt of a body is a sampling request of its own, carried out as a chat is; see `routes_chat`. The format is the engine's.
"""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from starlette.responses import Response

from offbeat.chat.completions import Completions
from offbeat.chat.dialects import COMMENT
from offbeat.chat.sending import ChatResponse
from offbeat.chat.size import check_text_size
from offbeat.data.tokenizer import Tokenizer
from offbeat.engine.answers import Answer, CompletionFormat, Prompt
from offbeat.engine.request import MAX_PROMPT_TOP, Output, Scored
from offbeat.engine.wire import CompletionBody, read_completion
from offbeat.errors import RefusedError
from offbeat.service.app.reply import Call, Endpoint, Served, explain
from offbeat.service.app.routes_chat import at_vendors_paths, find_sampler, said, sample_of, sample_request
from offbeat.service.engine_terms import top_rows
from offbeat.service.sampling import SamplingService
from offbeat.service.tables import SamplerRow
from offbeat.service.types import Sampled, SampleRequest
from offbeat.service.wire.json_body import MAX_SAMPLE_BYTES
from offbeat.telemetry.log import current_request

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256
"""Largest number of prompts in one body, each of which is a request in the queue."""


@dataclass(frozen=True)
class _Told:
    """An answer and its samples, in order."""

    answer: Answer
    outputs: Sequence[Output]


class _Writer:
    """Writes completions, whole or as a stream."""

    keep_alive = COMMENT
    error = Completions("service").error
    stream_error = Completions("service").stream_error

    def whole(self, request: CompletionBody, answer: _Told) -> bytes:  # noqa: ARG002
        return answer.answer.whole(answer.outputs)

    def events(self, request: CompletionBody, answer: _Told) -> Iterator[bytes]:  # noqa: ARG002
        yield from map(answer.answer.piece, answer.outputs)
        yield answer.answer.ending()


class CompletionRoutes:
    def __init__(self, sampling: SamplingService, served: Served, tokenizer: Tokenizer) -> None:
        """`tokenizer` is the base model's, under a name that clients may see."""
        self._sampling = sampling
        self._served = served
        self._tokenizer = tokenizer

    @property
    def endpoints(self) -> list[Endpoint]:
        """The endpoint, also at the hosted service's path."""
        return at_vendors_paths([Endpoint(
            "POST", "/v1/completions", self._complete, quiet=True, max_body_bytes=MAX_SAMPLE_BYTES, write_error=_Writer.error)])

    async def _complete(self, call: Call) -> Response:
        body = await said(call.read(partial(read_completion, surface="service")))
        row = await find_sampler(self._sampling, self._served, call.caller, body.model or "")
        prompts = await said(call.beside(self._prompts, body))
        requests = await said(call.beside(lambda: [self._request(row, prompt, body) for prompt in prompts]))
        asked: list[asyncio.Task[Sampled]] = []

        def give_up(_: object = None) -> None:
            for samples in asked:
                samples.cancel()

        try:
            for request in requests:
                asked.append(self._sampling.ask(call.caller, request))
        except BaseException:
            give_up()
            raise

        async def answer_prompts() -> _Told:
            outcomes = [await samples for samples in asked]
            return await call.readers.run(call.caller.owner, self._told, body, row, prompts, outcomes)

        task = asyncio.create_task(answer_prompts(), name=f"completion {current_request.get()}")
        task.add_done_callback(give_up)  # even if it never began to wait for them
        return ChatResponse(task, _Writer(), body, explain=partial(explain, what=f"POST {call.http.url.path}"))

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        """Return the token ids of a body's prompts, for example [[4, 2, 7]] for one prompt of 3 tokens."""
        given, limits = body.prompts, self._served.limits
        if not 0 < len(given) <= MAX_PROMPTS:
            raise RefusedError(f"prompt takes 1 to {MAX_PROMPTS} prompts here, got {len(given)}", param="prompt")
        if (top := body.prompt_top) is not None and not 0 <= top <= MAX_PROMPT_TOP:
            raise RefusedError(f"logprobs and prompt_logprobs of a prompt must be 0 to {MAX_PROMPT_TOP} likeliest tokens, got {top}")
        prompts = []
        for prompt in given:
            if isinstance(prompt, str):
                check_text_size(prompt, self._tokenizer, context=limits.context)
            prompts.append(self._tokenizer.prompt(prompt) if isinstance(prompt, str) else prompt)
            limits.check_length("prompt", len(prompts[-1]))
            limits.check_ids("prompt", prompts[-1])
        return prompts

    def _request(self, row: SamplerRow, prompt: list[int], body: CompletionBody) -> SampleRequest:
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        request = sample_request(
            row, prompt, stops=body.stops, stop_token_ids=tuple(body.stop_token_ids or ()), shaping=body.shaping(),
            ignore_eos=body.ignore_eos, n=body.n, max_tokens=max_tokens or int(body.echo), seed=body.seed, temperature=body.temperature,
            top_k=body.top_k, top_p=body.top_p, top_logprobs=body.num_top)
        return replace(request, prompt_logprobs=body.prompt_top is not None, topk_prompt_logprobs=body.prompt_top or 0)

    def _told(self, body: CompletionBody, row: SamplerRow, prompts: list[list[int]], outcomes: list[Sampled]) -> _Told:
        form = CompletionFormat(packed=body.encoding_format == "base64")
        answer = Answer(
            f"{form.prefix}-{uuid.uuid4().hex}", form, body, tokenizer=self._tokenizer, model=body.model or self._served.base_model,
            prompt_len=sum(map(len, prompts)),
            prompts=[
                Prompt(ids, given, _scored(outcome, row))
                for ids, given, outcome in zip(prompts, body.prompts, outcomes, strict=True)])
        samples = [sample_of(sequence, row) for outcome in outcomes for sequence in outcome.sequences]
        if body.max_tokens == 0:  # a token was sampled because every request samples one
            return _Told(answer, [Output(index, [], [], [], "length", []) for index in range(len(samples))])
        return _Told(answer, [
            Output(
                index, list(sample.token_ids), list(sample.logprobs), list(sample.versions),
                "stop" if sample.finish_reason == "stop" else "length", list(sample.top_logprobs) if body.num_top else None)
            for index, sample in enumerate(samples)])


def _scored(outcome: Sampled, row: SamplerRow) -> Scored | None:
    """Return the prompt's log-probabilities in the engine's form; None if they are not wanted, or the prompt has one token."""
    logprobs, top = outcome.prompt_logprobs, outcome.topk_prompt
    if logprobs is None or len(logprobs) < 2:
        return None
    return Scored(row.version, logprobs[1:].tolist(), None if top is None else list(top_rows(top))[1:], None)
