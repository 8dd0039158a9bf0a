"""Answers of the engine's HTTP endpoints, in OpenAI's format plus `token_ids` and `versions`. Used by `server`; no I/O.

With `encoding_format: "base64"` a completion holds arrays, which take a fortieth of the time to read.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import numpy as np

from offbeat.chat.answering import token_logprobs
from offbeat.chat.completions import DONE, told_logprob, usage_of
from offbeat.chat.dialects import data
from offbeat.data.expert_routes import pack_routes
from offbeat.data.sample_supports import pack_supports
from offbeat.data.tokenizer import Tokenizer
from offbeat.engine.request import Output, Scored
from offbeat.engine.text import TextStream, cut_at_stop
from offbeat.engine.wire import CompletionBody, GenerateBody
from offbeat.inference.sampling import TopTokens


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt of a completion.

    Attributes:
        given: the prompt as the client sent it, text or token ids such as [1, 17, 4].
        scored: its log-probabilities; None if they are not wanted, and for a prompt of one token.
    """

    ids: list[int]
    given: str | list[int]
    scored: Scored | None

    def text(self, tokenizer: Tokenizer) -> str:
        return self.given if isinstance(self.given, str) else tokenizer.decode(self.ids, skip_special_tokens=False)

    def rows(self) -> tuple[list[float | None], list[TopTokens | None]]:
        """Log-probabilities and likeliest tokens at each position; None at the first position."""
        if self.scored is None:
            return [None] * len(self.ids), [None] * len(self.ids)
        return [None, *self.scored.logprobs], [None, *(self.scored.top or [()] * len(self.scored.logprobs))]

    def told(self, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
        """Its log-probabilities in vLLM's form: at each position its token and the likeliest, by their ids."""
        told: list[dict[str, Any] | None] = []
        for token, logprob, top in zip(self.ids, *self.rows(), strict=True):
            ranked = {likely: (value, rank) for rank, (likely, value) in enumerate(top or (), 1)}
            told.append(None if logprob is None else {
                str(one): {"logprob": value, "rank": rank, "decoded_token": tokenizer.decode_continuation([one], skip_special_tokens=False)}
                for one, (value, rank) in {token: (logprob, None), **ranked}.items()})
        return told


class Format(Protocol):
    """The format of an answer's parts at one endpoint."""

    prefix: str
    kind: str
    chunk_kind: str

    def text(self, text: str, *, first: bool) -> dict[str, Any]:
        """Return the part of a choice that holds the text; `first` if it is the first of its sample."""
        ...

    def logprobs(self, output: Output, tokenizer: Tokenizer, *, prompt: Prompt | None = None, offset: int = 0) -> dict[str, Any]:
        """Return the part of a choice that holds log-probabilities.

        Args:
            prompt: a prompt whose log-probabilities come first; None if it is not told again.
            offset: number of characters of the sample that were told before.
        """
        ...


class CompletionFormat:
    """The format of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, *, packed: bool = False) -> None:
        """`packed` gives log-probabilities as the bytes of an array."""
        self._packed = packed

    def text(self, text: str, *, first: bool) -> dict[str, Any]:  # noqa: ARG002
        return {"text": text}

    def logprobs(self, output: Output, tokenizer: Tokenizer, *, prompt: Prompt | None = None, offset: int = 0) -> dict[str, Any]:
        before = ([], []) if prompt is None else prompt.rows()
        logprobs = [*before[0], *output.logprobs]
        told: dict[str, Any] = {
            "token_logprobs": array_bytes([math.nan if lp is None else lp for lp in logprobs], np.float32) if self._packed else logprobs}
        if output.top_logprobs is not None:  # in vLLM's form, which distinguishes tokens of equal text
            rows = [*before[1], *output.top_logprobs]
            told["top_logprobs"] = [None if row is None else {f"token_id:{token}": lp for token, lp in row} for row in rows]
        if not self._packed:  # decoding tokens one by one would cost more than the rest of a packed answer
            before_ids = [] if prompt is None else prompt.ids
            told["tokens"] = [
                tokenizer.decode_continuation([token], skip_special_tokens=False) for token in (*before_ids, *output.token_ids)]
            begins = offset + (0 if prompt is None else len(prompt.text(tokenizer)))
            told["text_offset"] = [
                *_offsets(before_ids, tokenizer, offset), *_offsets(output.token_ids, tokenizer, begins, after=tokenizer.anchor)]
        return told


class ChatFormat:
    """The format of a stream of /v1/chat/completions without tools; `chats` has the other ways to answer chats."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def text(self, text: str, *, first: bool) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

    def logprobs(
        self, output: Output, tokenizer: Tokenizer, *, prompt: Prompt | None = None, offset: int = 0,  # noqa: ARG002
    ) -> dict[str, Any]:
        return {"content": list(map(told_logprob, token_logprobs(output, tokenizer)))}


class Answer:
    """Encodes the outputs of one request as bytes, whole or as server-sent events."""

    def __init__(
        self, request_id: str, form: Format, body: GenerateBody, *, tokenizer: Tokenizer, model: str, prompt_len: int,
        prompts: Sequence[Prompt] = (),
    ) -> None:
        """Prepare to answer; `prompts` are a completion's, which are told again where the client asks for it."""
        self._prompts = prompts
        self._told: dict[int, int] = {}  # characters of each sample that were told
        self._form = form
        self._body = body
        self._tokenizer = tokenizer
        self._prompt_len = prompt_len
        self._num_generated = 0
        self._num_cached: dict[int, int] = {}  # of each prompt
        self._streams: dict[int, TextStream] = {}
        self._head = {"id": request_id, "created": int(time.time()), "model": model}

    def whole(self, outputs: Sequence[Output]) -> bytes:
        """Encode the answer to a request that does not stream, once all samples are done."""
        self._add_counts(*outputs)
        choices = []
        for output in sorted(outputs, key=lambda o: o.index):
            whole = replace(output, token_ids=[*self._begun(output), *output.token_ids])
            text = self._text(told_ids(whole, self._body))
            choices.append(self._choice(output, text, first=True))
        return msgspec.json.encode({**self._head, "object": self._form.kind, "choices": choices, "usage": self._usage()})

    def piece(self, output: Output) -> bytes:
        """Encode one event of a streaming answer."""
        self._add_counts(output)
        first = output.index not in self._streams
        stream = self._streams.setdefault(output.index, self._stream())
        text = "".join(map(stream.push, told_ids(output, self._body)))
        if output.finish_reason is not None:
            text += stream.finish()
        return self._chunk([self._choice(output, text, first=first)], {"usage": None})

    def _begun(self, output: Output) -> list[int]:
        body = self._body
        if not (isinstance(body, CompletionBody) and body.begun_tokens):
            return []
        return self._prompts[output.index // body.n].ids[-body.begun_tokens :]

    def _text(self, ids: list[int]) -> str:
        """Return the text of a whole sample, up to its stop string."""
        body = self._body
        if not (body.stops and body.min_tokens):
            return cut_at_stop(self._tokenizer.decode_continuation(ids), body.stops, keep_stop=bool(body.include_stop_str_in_output))
        stream = self._stream()
        return "".join([*map(stream.push, ids), stream.finish()])

    def _stream(self) -> TextStream:
        body = self._body
        return TextStream(
            self._tokenizer, body.stops, min_tokens=body.min_tokens or 0, keep_stop=bool(body.include_stop_str_in_output),
            after=self._tokenizer.anchor)

    def ending(self) -> bytes:
        """Encode the end of the stream, after the numbers of tokens if they are wanted."""
        return (self._chunk([], {"usage": self._usage()}) if self._body.include_usage else b"") + DONE

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        usage = usage if self._body.include_usage else {}
        return data({**self._head, "object": self._form.chunk_kind, "choices": choices, **usage})

    def _add_counts(self, *outputs: Output) -> None:
        self._num_generated += sum(len(output.token_ids) for output in outputs)
        self._num_cached |= {output.index // self._body.n: output.num_cached for output in outputs}

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._prompt_len, self._num_generated, num_cached=sum(self._num_cached.values()))

    def _choice(self, output: Output, text: str, *, first: bool) -> dict[str, Any]:
        body, prompt = self._body, None
        if isinstance(body, CompletionBody) and self._prompts and first:
            prompt = self._prompts[output.index // body.n]
        echoed = prompt if isinstance(body, CompletionBody) and body.echo else None
        text = text if echoed is None else echoed.text(self._tokenizer) + text
        offset = self._told.get(output.index, 0)
        self._told[output.index] = offset + len(text)
        choice = {"index": output.index, **self._form.text(text, first=first), "finish_reason": output.finish_reason, "logprobs": None}
        if body.wants_logprobs:
            choice["logprobs"] = self._form.logprobs(output, self._tokenizer, prompt=echoed, offset=offset)
        if prompt is not None and isinstance(body, CompletionBody) and body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt.told(self._tokenizer)
        if self._body.return_token_ids:
            choice["token_ids"], choice["versions"] = (
                (array_bytes(output.token_ids, np.int32), array_bytes(output.versions, np.int32)) if self._body.encoding_format == "base64"
                else (output.token_ids, output.versions))
        if output.routes is not None:
            choice["routed_experts"] = pack_routes(output.routes)  # which msgspec writes as base64
        if output.supports is not None:
            choice["supports"] = pack_supports(output.supports)
        return choice


def _offsets(ids: Sequence[int], tokenizer: Tokenizer, offset: int, *, after: Sequence[int] = ()) -> list[int]:
    """Return the offset in characters at which each token's text begins, such as [0, 5, 9]; tokens of one character share its offset.

    The first is at `offset`; `after` are tokens of the preceding text, as `TextStream` takes them.
    """
    stream, offsets = TextStream(tokenizer, after=after), []
    for token in ids:
        offsets.append(offset)
        offset += len(stream.push(token))
    return offsets


def array_bytes(values: Sequence[float], dtype: type) -> bytes:
    """Return the bytes of an array of this dtype, which msgspec writes as base64."""
    return np.array(values, dtype).tobytes()


def told_ids(output: Output, body: GenerateBody) -> list[int]:
    """Return the tokens of the answer's text, without a stop token that the body does not keep: [5, 8] of [5, 8, 2], where 2 is one."""
    if body.include_stop_str_in_output:
        return output.token_ids
    stopped = output.finish_reason == "stop" and output.token_ids[-1] in (body.stop_token_ids or ())
    return output.token_ids[:-1] if stopped else output.token_ids
