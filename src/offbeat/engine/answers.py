"""Answers of the engine's HTTP endpoints, in OpenAI's format plus `token_ids` and `versions`. Used by `server`; no I/O."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from offbeat.data.tokenizer import Tokenizer
from offbeat.engine.request import Output
from offbeat.engine.text import TextStream, cut_at_stop
from offbeat.engine.wire import GenerateBody

DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """How one endpoint formats the parts of an answer."""

    prefix: str
    kind: str
    chunk_kind: str

    def text(self, text: str, *, chunk: bool) -> dict[str, Any]:
        """Return the part of a choice that holds the text."""
        ...

    def logprobs(self, output: Output, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the part of a choice that holds log-probabilities."""
        ...


class CompletionFormat:
    """The format of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def text(self, text: str, *, chunk: bool) -> dict[str, Any]:  # noqa: ARG002
        return {"text": text}

    def logprobs(self, output: Output, tokenizer: Tokenizer) -> dict[str, Any]:  # noqa: ARG002
        # OpenAI's `tokens` are left out: decoding them one by one would cost more than the rest of the answer.
        told: dict[str, Any] = {"token_logprobs": output.logprobs}
        if output.top_logprobs is not None:  # in vLLM's form, which distinguishes tokens of equal text
            told["top_logprobs"] = [{f"token_id:{token}": logprob for token, logprob in row} for row in output.top_logprobs]
        return told


class ChatFormat:
    """The format of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def text(self, text: str, *, chunk: bool) -> dict[str, Any]:
        return {"delta" if chunk else "message": {"role": "assistant", "content": text}}

    def logprobs(self, output: Output, tokenizer: Tokenizer) -> dict[str, Any]:
        tokens = [tokenizer.decode([token], skip_special_tokens=False) for token in output.token_ids]
        return {"content": [{"token": token, "logprob": logprob} for token, logprob in zip(tokens, output.logprobs, strict=True)]}


class Answer:
    """Encodes the outputs of one request as bytes, whole or as server-sent events."""

    def __init__(
        self,
        request_id: str,
        form: Format,
        body: GenerateBody,
        *,
        tokenizer: Tokenizer,
        model: str,
        prompt_len: int,
        stops: tuple[str, ...],
    ) -> None:
        self._form = form
        self._body = body
        self._tokenizer = tokenizer
        self._prompt_len = prompt_len
        self._stops = stops
        self._streams: dict[int, TextStream] = {}
        self._head = {"id": request_id, "created": int(time.time()), "model": model}

    def whole(self, outputs: Sequence[Output]) -> bytes:
        """Encode the answer to a request that does not stream, once all samples are done."""
        generated = sum(len(output.token_ids) for output in outputs)
        usage = {"prompt_tokens": self._prompt_len, "completion_tokens": generated, "total_tokens": self._prompt_len + generated}
        choices = []
        for output in sorted(outputs, key=lambda o: o.index):
            text = cut_at_stop(self._tokenizer.decode(self._told(output)), self._stops)
            choices.append(self._choice(output, text, chunk=False))
        return msgspec.json.encode({**self._head, "object": self._form.kind, "choices": choices, "usage": usage})

    def piece(self, output: Output) -> bytes:
        """Encode one event of a streaming answer."""
        stream = self._streams.setdefault(output.index, TextStream(self._tokenizer, self._stops))
        text = "".join(map(stream.push, self._told(output)))
        if output.finish_reason is not None:
            text += stream.finish()
        choice = self._choice(output, text, chunk=True)
        return b"data: " + msgspec.json.encode({**self._head, "object": self._form.chunk_kind, "choices": [choice]}) + b"\n\n"

    def _told(self, output: Output) -> list[int]:
        """Return the tokens whose text belongs to the answer: all but a stop token at the end."""
        stopped = output.finish_reason == "stop" and output.token_ids[-1] in (self._body.stop_token_ids or ())
        return output.token_ids[:-1] if stopped else output.token_ids

    def _choice(self, output: Output, text: str, *, chunk: bool) -> dict[str, Any]:
        choice = {"index": output.index, **self._form.text(text, chunk=chunk), "finish_reason": output.finish_reason, "logprobs": None}
        if self._body.wants_logprobs:
            choice["logprobs"] = self._form.logprobs(output, self._tokenizer)
        if self._body.return_token_ids:
            choice["token_ids"], choice["versions"] = output.token_ids, output.versions
        return choice


def error_body(message: str, *, status: int) -> bytes:
    """Encode an error in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})
