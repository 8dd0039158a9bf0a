"""Canonical messages, which all dialects read and write. Frozen; no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from offbeat.chat.shaping import PLAIN, Shaping
from offbeat.data.image_sources import ImageSource

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "tool_calls", "abort"]
SaidKind = Literal["reasoning", "content"]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model; `id` connects it with its result. `arguments`, as the model wrote it, is like '{"city": "Oslo"}'."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message of a chat.

    Attributes:
        content: its text, with `image_sources.MARK` in the places of its images; empty beside calls.
        calls: of an assistant's message.
        call_id: of a tool's message, the call that it answers.
        name: of a tool's message, the tool; else the author, if given.
        reasoning: of an assistant's message, the text before its answer that users do not see.
        images: of a message of a user or a tool, in the order of their marks.
    """

    role: Role
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    reasoning: str = ""
    images: tuple[ImageSource, ...] = ()


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call. `parameters` is a JSON schema of an object; if `strict`, a forced call's arguments must fit it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """A client's request. None leaves a choice to the server.

    Attributes:
        tool_choice: "auto", "none" or "required".
        tool_name: the tool that has to be called, if the client names one; `tool_choice` is then "required".
        parallel_calls: whether an answer may hold several calls.
        logprobs: whether each token's log-probability is wanted.
        top_logprobs: number of likeliest tokens that are wanted at each position.
        include_usage: whether a stream ends with the numbers of tokens.
        shaping: penalties, biases, structured outputs; see `Shaping`, and `ShapingFields` for its form in bodies.
        stop_token_ids, ignore_eos, scaled_logprobs: as in `inference.sampling.Sampling`.
        effort: how long to reason, such as "low", for templates that read `reasoning_effort`; empty if the client does not say.
        thinks: whether to reason before the answer, for templates that read `enable_thinking`; None if the client does not say.
        return_token_ids: whether the ids of tokens, and the versions that sampled them, are wanted; only chat completions can ask.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str = ""
    parallel_calls: bool = True
    model: str = ""
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    shaping: Shaping = PLAIN
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    scaled_logprobs: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    effort: str = ""
    thinks: bool | None = None


class Said(NamedTuple):
    """A piece of an answer's text, or of its reasoning; the pieces of a kind put together are the whole."""

    kind: SaidKind
    text: str


Piece = Said | ToolCall
"""A part of an answer that is sent while the rest is still generated."""


def pieces_of(reasoning: str, content: str, calls: Sequence[ToolCall]) -> list[Piece]:
    """Return a whole answer in pieces, without texts that are empty."""
    said = [Said("reasoning", reasoning), Said("content", content)]
    return [*(piece for piece in said if piece.text), *calls]


class TokenLogprob(NamedTuple):
    """A token of an answer with its log-probability; `data` is its bytes, perhaps part of a character, `top` the likeliest, if wanted."""

    text: str
    logprob: float
    data: bytes
    top: "tuple[TokenLogprob, ...]" = ()


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        stop: the stop string that ended it; empty if none did.
        logprobs: of each token, if they are wanted.
        token_ids: the generated tokens, if they are wanted.
        versions: of the weights that sampled each of them.
        malformed: the fault of a call that could not be read, which `message` then holds as text; else empty.
    """

    message: Message
    finish: Finish
    stop: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    num_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    malformed: str = ""


@dataclass(frozen=True)
class ChatAnswer:
    """A whole answer, before a dialect writes it.

    Attributes:
        id: unique; the dialect adds its own prefix.
        created: seconds since the epoch.
        prompt_ids: the prompt's tokens, if they are wanted.
        num_cached_tokens: number of the prompt's first tokens that the engine did not compute, because an earlier prompt began with them.
    """

    id: str
    created: int
    model: str
    replies: tuple[Reply, ...]
    num_prompt_tokens: int
    prompt_ids: tuple[int, ...] = ()
    num_cached_tokens: int = 0
