"""Endpoints of chats with an owner's samplers or the base model, for clients of OpenAI's and Anthropic's APIs, with tools.

A chat is rendered and read here, and sampled as by `asample`: by the same queue, at the same cost, within the same limits, its images read
as those of a prompt there. Answers are whole; a stream is sent when its answer is complete. A client that disconnects gives its samples up.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from starlette.responses import Response

from offbeat.chat.answering import Answering, Chat, answer_of
from offbeat.chat.anthropic import Anthropic
from offbeat.chat.completions import Completions
from offbeat.chat.dialects import ChatDialect, list_models
from offbeat.chat.messages import ChatAnswer, ChatRequest
from offbeat.chat.responses import Responses
from offbeat.chat.sending import ChatResponse
from offbeat.chat.shaping import Shaping
from offbeat.chat.size import check_chat_size
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import ModelError, RefusedError
from offbeat.inference.sampling import Sample
from offbeat.service.app.reply import Call, Endpoint, Served, explain
from offbeat.service.app.request_images import RequestImages
from offbeat.service.engine_terms import top_rows
from offbeat.service.errors import RequestError, outside
from offbeat.service.ids import CheckpointPath
from offbeat.service.library import Library
from offbeat.service.sampling import SamplingService
from offbeat.service.tables import SamplerRow
from offbeat.service.types import Caller, SampledSequence, SampleRequest
from offbeat.service.wire.chunks import ImageChunk, count_patches
from offbeat.service.wire.json_body import MAX_SAMPLE_BYTES, read_json
from offbeat.service.wire.sample_body import MAX_IMAGE_SAMPLE_BYTES, SamplingBody, TopTokens, check_values
from offbeat.telemetry.log import current_request

T = TypeVar("T")
_VENDORS = {
    "/v1/chat/completions": "/oai/api", "/v1/completions": "/oai/api", "/v1/models": "/oai/api", "/v1/messages": "/anthropic/api",
    "/v1/messages/count_tokens": "/anthropic/api"}
"""Prefixes of the paths under which the hosted service has these endpoints, e.g. /oai/api/v1/models; here they work, too."""
_ANTHROPIC = Anthropic("service")


class _Params(SamplingBody):
    """Settings of a chat or a completion, within the bounds of `asample`."""

    n: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    top_logprobs: TopTokens = 0


def at_vendors_paths(endpoints: list[Endpoint]) -> list[Endpoint]:
    """Return endpoints, with the ones of `_VENDORS` a second time at the hosted service's paths."""
    vendors = [replace(one, path=_VENDORS[one.path] + one.path) for one in endpoints if one.path in _VENDORS]
    return [*endpoints, *vendors]


class ChatRoutes:
    def __init__(self, sampling: SamplingService, library: Library, served: Served, *, tokenizer: Tokenizer, images: RequestImages) -> None:
        """`tokenizer` is the base model's, under a name that clients may see, and `images` reads what it has in place of images."""
        self._sampling = sampling
        self._library = library
        self._served = served
        self._tokenizer = replace(tokenizer, images=served.images)
        self._images = images

    @property
    def endpoints(self) -> list[Endpoint]:
        answering: list[tuple[str, ChatDialect]] = [
            ("/v1/chat/completions", Completions("service")), ("/v1/responses", Responses("service")), ("/v1/messages", _ANTHROPIC)]
        limits = {"quiet": True, "max_body_bytes": MAX_SAMPLE_BYTES if self._served.images is None else MAX_IMAGE_SAMPLE_BYTES}
        return at_vendors_paths([
            *(Endpoint("POST", path, partial(self._reply, dialect), write_error=dialect.error, **limits) for path, dialect in answering),
            Endpoint("POST", "/v1/messages/count_tokens", self._count, write_error=_ANTHROPIC.error, **limits),
            Endpoint("GET", "/v1/models", self._models, write_error=Completions().error)])

    @cached_property
    def _answering(self) -> Answering:  # late, because a model without a chat template serves all but chats
        if not self._tokenizer.has_chat_template:
            raise ModelError(f"the model {self._served.base_model!r} has no chat template, so it cannot be asked in chats; use the SDK")
        return Answering.of(self._tokenizer)

    async def _reply(self, dialect: ChatDialect, call: Call) -> Response:
        asked = await self._parse(call, dialect)
        row = await self._find(call.caller, asked.model)
        num_patches = await self._read_images(call.caller, asked)
        # Always off the event loop, because a small body may take long to render.
        chat = await said(call.beside(lambda: self._answering.prepare_chat(asked, dialect)))
        samples = self._sampling.ask(call.caller, self._request(row, chat, num_patches))
        readers, caller = call.readers, call.caller

        async def answer_asked() -> ChatAnswer:
            sampled = await samples
            return await readers.run(caller.owner, self._read_answer, chat, row, sampled.sequences)

        task = asyncio.create_task(answer_asked(), name=f"chat {current_request.get()}")
        task.add_done_callback(lambda _: samples.cancel())  # even if it never began to wait for them
        return ChatResponse(task, dialect, asked, explain=partial(explain, what=f"POST {call.http.url.path}"))

    async def _count(self, call: Call) -> Response:
        asked = await self._parse(call, _ANTHROPIC)
        await self._find(call.caller, asked.model)
        await self._read_images(call.caller, asked)
        num_tokens = await said(call.beside(lambda: self._answering.count(asked)))
        return Response(_ANTHROPIC.count(num_tokens), media_type="application/json")

    async def _models(self, call: Call) -> Response:
        """List the base model's names, and the paths of the caller's weights for sampling, newest first."""
        checkpoints, _ = self._library.list_checkpoints(call.caller)
        paths = {str(CheckpointPath(info.run_id, info.kind, info.name)): info.created for info in checkpoints if info.kind == "sampler"}
        names = dict.fromkeys((self._served.base_model, *self._served.aliases), 0.0)
        return Response(list_models(names | paths), media_type="application/json")

    async def _parse(self, call: Call, dialect: ChatDialect) -> ChatRequest:
        def read(body: bytes) -> ChatRequest:
            check_values(body)
            asked = dialect.read(body)
            check_chat_size(asked, self._tokenizer, context=self._served.limits.context)
            return asked

        return await said(call.read(read))

    async def _read_images(self, caller: Caller, asked: ChatRequest) -> int:
        """Read the images of a chat, so that rendering finds them, and return their number of patches."""
        if self._served.images is None:  # rendering refuses them
            return 0
        sources = [image for message in asked.messages for image in message.images]
        chunks = [ImageChunk(f"the chat: image {number}", source.data, None) for number, source in enumerate(sources, start=1)]
        return count_patches((await self._images.read(caller.owner, chunks)).values())

    async def _find(self, caller: Caller, model: str) -> SamplerRow:
        return await find_sampler(self._sampling, self._served, caller, model)

    def _request(self, row: SamplerRow, chat: Chat, num_patches: int) -> SampleRequest:
        """Check a chat's settings and its length, and return its sampling request."""
        asked = chat.request
        self._served.limits.check_length("the chat", len(chat.prompt))
        return sample_request(
            row, chat.prompt, stops=chat.stops, stop_token_ids=chat.stop_token_ids, shaping=asked.shaping, ignore_eos=asked.ignore_eos,
            n=asked.n, max_tokens=asked.max_new_tokens, seed=asked.seed, temperature=asked.temperature, top_k=asked.top_k,
            top_p=asked.top_p, top_logprobs=asked.top_logprobs, num_patches=num_patches)

    def _read_answer(self, chat: Chat, row: SamplerRow, sequences: tuple[SampledSequence, ...]) -> ChatAnswer:
        replies = [self._answering.reply(chat, sample_of(sequence, row)) for sequence in sequences]
        return answer_of(chat.request, chat.prompt, replies, model=chat.request.model)


async def find_sampler(sampling: SamplingService, served: Served, caller: Caller, model: str) -> SamplerRow:
    """Return the sampler that a request's `model` names, such as "tinker://RUN/sampler_weights/final".

    Raises:
        UnknownError: the caller has no model of that name.
        RequestError: the model's tokenizer is not known.
    """
    row = await sampling.samplers.of_model(caller, model)
    if row.base_model in served.sampled:
        raise RequestError(
            f"{row.base_model!r} cannot be asked in chats or texts here, because its tokenizer is not known; sample it with the SDK, or ask"
            " its own engine")
    return row


def sample_request(
    row: SamplerRow, prompt: Sequence[int], *, stops: tuple[str, ...], stop_token_ids: tuple[int, ...], shaping: Shaping,
    ignore_eos: bool, num_patches: int = 0, **params: Any,
) -> SampleRequest:
    """Return the sampling request of a chat or a completion; settings that are None are left out.

    `params` are fields of `asample`, `n` and `top_logprobs`; raises BadRequestError if one is out of range.
    """
    given = {name: value for name, value in {**params, "stop": stops or None}.items() if value is not None}
    checked = read_json(_Params, msgspec.json.encode(given))
    return SampleRequest(
        row.id, secrets.randbits(62), tuple(prompt), num_samples=checked.n, max_tokens=checked.max_tokens, seed=checked.seed,
        stop=(*stops, *stop_token_ids) or None, temperature=checked.temperature, top_k=max(checked.top_k, 0), top_p=checked.top_p,
        topk_sample_logprobs=checked.top_logprobs, ignore_eos=ignore_eos, num_patches=num_patches, shaping=shaping)


async def said(work: Awaitable[T]) -> T:
    """Wait for work on a request, and turn its errors into refusals."""
    try:
        return await work
    except RefusedError as exc:
        raise RequestError(str(exc)) from exc
    except ModelError as exc:
        raise RequestError(outside(str(exc), name=current_request.get())) from exc


def sample_of(sequence: SampledSequence, row: SamplerRow) -> Sample:
    """Return a sample whose tokens all have the sampler's version."""
    versions = np.full(len(sequence.tokens), row.version, np.int32)
    top = () if sequence.top is None else top_rows(sequence.top)
    return Sample(sequence.tokens, sequence.logprobs, versions, "", sequence.stop_reason, top_logprobs=top)
