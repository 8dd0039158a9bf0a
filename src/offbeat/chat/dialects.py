"""The contract of the three dialects of chats, and their common code that reads bodies and writes answers. No I/O.

`completions`, `responses` and `anthropic` each hold one dialect. The table in `fields` says how each field of a body is treated. A field
that cannot be honoured is refused with a sentence, so that no agent waits for an effect that does not come.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from offbeat.chat.fields import Api, Surface, check_fields
from offbeat.chat.image_parts import ImageRules, Shown, check_detail, join_parts
from offbeat.chat.messages import ChatAnswer, ChatRequest, Message, Piece, Reply, TokenLogprob, Tool, ToolCall, pieces_of
from offbeat.chat.shaping import ShapingFields, Structure
from offbeat.data.image_sources import PART_KINDS, ImageSource
from offbeat.errors import RefusedError, first_line

T = TypeVar("T")

COMMENT = b": keep-alive\n\n"
"""A comment, which readers of server-sent events skip."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


class ChatDialect(Protocol):
    """One API's way to write chats.

    Attributes:
        keep_alive: the event of a stream that waits, such as `COMMENT`.
        always_parsed: whether an answer is split into its parts even without tools in the request; else it is the text that was written.
    """

    keep_alive: bytes
    always_parsed: bool
    _surface: Surface
    _rules: ImageRules

    def __init__(self, surface: Surface = "engine", *, image_files: Path | None = None) -> None:
        """
        Args:
            surface: chooses the column of the table of fields, such as "engine".
            image_files: folder that paths of images may lead to; None refuses paths.
        """
        self._surface = surface
        self._rules = ImageRules(image_files)

    def read(self, body: bytes) -> ChatRequest:
        """Read the body of a request; raises RefusedError, for status 400, if it is wrong or asks for something unsupported."""
        ...

    def whole(self, request: ChatRequest, answer: ChatAnswer) -> bytes:
        """Write the body of an answer."""
        ...

    def stream(self, request: ChatRequest, begun: ChatAnswer) -> "AnswerStream":
        """Return the writer of an answer that grows; `begun` has no replies yet."""
        ...

    def events(self, request: ChatRequest, answer: ChatAnswer) -> Iterator[bytes]:
        """Write a whole answer as a stream of server-sent events."""
        stream = self.stream(request, answer)
        yield stream.begin()
        for index, reply in enumerate(answer.replies):
            message = reply.message
            yield stream.pieces(index, pieces_of(message.reasoning, message.content, message.calls), reply.logprobs)
            yield stream.close(index, reply)
        yield stream.end(answer)

    def error(self, message: str, *, status: int, param: str = "") -> bytes:
        """Write the body of an error, by default in OpenAI's form; `param` is the field that is wrong, such as "tool_choice", or empty."""
        return msgspec.json.encode(openai_error(message, status=status, param=param))

    def stream_error(self, message: str, *, status: int) -> bytes:
        """Write the event that ends a stream with an error, where nothing of the answer was sent before."""
        ...


class AnswerStream(Protocol):
    """Writes one answer as server-sent events while it grows. Each call returns events; none at all is b""."""

    def begin(self) -> bytes:
        """Write the events before all replies."""
        ...

    def pieces(self, index: int, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """Write more of a reply; `logprobs` are of the tokens since the last call, perhaps more or fewer than those of the pieces."""
        ...

    def close(self, index: int, reply: Reply) -> bytes:
        """Write the end of a reply, whose pieces have all been written."""
        ...

    def end(self, answer: ChatAnswer) -> bytes:
        """Write the events after all replies."""
        ...

    def error(self, message: str, *, status: int) -> bytes:
        """Write the event that ends the stream with an error."""
        ...


class Wishes(ShapingFields, kw_only=True):
    """Fields that chat completions and Responses have in common."""

    model: str | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    top_logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    scaled_logprobs: bool | None = None

    def wanted(self, *, structure: Structure | None = None) -> dict[str, Any]:
        """Return them as fields of a `ChatRequest`; `structure` is a form of answers that the API writes in its own way."""
        return {
            **extras_of(self), "shaping": self.shaping(structure=structure),
            "model": self.model or "", "parallel_calls": self.parallel_tool_calls is not False, "temperature": self.temperature,
            "top_p": self.top_p, "top_k": self.top_k, "seed": self.seed, "stream": bool(self.stream),
            "top_logprobs": self.top_logprobs or 0,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())}


class Extras(Protocol):
    """Fields of Offbeat's and vLLM's engines that every API of chats has besides its own."""

    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    scaled_logprobs: bool | None


def extras_of(body: Extras) -> dict[str, Any]:
    """Return them as fields of a `ChatRequest`, such as {"ignore_eos": False}."""
    return {
        "stop_token_ids": tuple(body.stop_token_ids or ()), "ignore_eos": bool(body.ignore_eos),
        "scaled_logprobs": bool(body.scaled_logprobs)}


class ContentPart(msgspec.Struct):
    """A piece of a message: text or an image."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    detail: Any = None


_PATH = re.compile(r"at `\$\.?([^`]+)`")
_CODES = {
    400: "invalid_request", 401: "invalid_api_key", 403: "forbidden", 404: "not_found", 405: "method_not_allowed", 409: "conflict",
    413: "request_too_large", 415: "unsupported_media_type", 429: "rate_limit_exceeded", 503: "unavailable"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")


def read_body(kind: type[T], data: bytes) -> T:
    """Decode and check a body; raises RefusedError, which names the field, if it is not JSON, lacks a field or has a wrong one."""
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise _wrong(exc) from exc


def read_fields(kind: type[T], data: bytes, *, api: Api, surface: Surface) -> T:
    """Decode a body; null fields count as left out, and others must be honoured. Raises as `read_body` and `fields.check_fields`."""
    body = read_body(dict[str, Any], data)
    check_fields(api, surface, body)
    try:
        return msgspec.convert({name: value for name, value in body.items() if value is not None}, kind)
    except (msgspec.ValidationError, RecursionError) as exc:
        raise _wrong(exc) from exc


def _wrong(exc: Exception) -> RefusedError:
    path = _PATH.search(str(exc))
    return RefusedError(f"the request body is wrong: {exc}", param=path.group(1) if path else "")


def text_of(content: str | Sequence[ContentPart] | None, where: str) -> str:
    """Return the text of a message's content; parts become lines."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text_of_part(part, where, why="only messages of users and tools have images") for part in content)


def content_of(content: str | Sequence[ContentPart] | None, where: str, rules: ImageRules) -> Shown:
    """Return text and images of a user's or tool's message; raises RefusedError for other parts, or images against the rules."""
    if content is None or isinstance(content, str):
        return Shown(content or "")
    parts: list[str | ImageSource] = []
    for at, part in enumerate(content):
        if part.type not in PART_KINDS:
            parts.append(_text_of_part(part, where, why="models here read text alone"))
            continue
        address, detail = part.image_url, part.detail
        if isinstance(address, Mapping):
            address, detail = address.get("url"), address.get("detail", detail)
        check_detail(detail, f"{where}[{at}]")
        parts.append(rules.source_of(address, f"{where}[{at}], a part of type {part.type!r},"))
    return join_parts(parts, where)


def _text_of_part(part: ContentPart, where: str, *, why: str) -> str:
    if part.type not in _TEXT_PARTS:
        why = why if part.type in PART_KINDS else "models here read text alone"
        raise RefusedError(f"{where} has a part of type {part.type!r}, and {why}; leave it out")
    return part.text or part.refusal or ""


def call_of(call_id: str, name: str, arguments: str | Mapping[str, Any] | None, where: str) -> ToolCall:
    """Check a past call: its arguments have to be an object, or the JSON text of one. None are an empty object."""
    text = arguments if isinstance(arguments, str) else json.dumps(dict(arguments or {}), ensure_ascii=False)
    try:
        read = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError) as exc:
        raise RefusedError(f"{where}: the arguments of the call of {name!r} are not JSON: {first_line(exc)}") from exc
    if not isinstance(read, dict):
        raise RefusedError(f"{where}: the arguments of the call of {name!r} must be a JSON object, got {text[:80]!r}")
    return ToolCall(call_id, name, text or "{}")


def tool_of(name: str, description: str | None, parameters: Mapping[str, Any] | None, *, strict: bool | None = None) -> Tool:
    """Check the description of a tool."""
    if not name:
        raise RefusedError("each of tools must have a name, got ''")
    return Tool(name, description or "", parameters or _NO_PARAMETERS, strict=bool(strict))


def tools_wanted(given: Iterable[Tool], choice: tuple[str, str]) -> dict[str, Any]:
    """Return tools and choice as fields of a `ChatRequest`.

    The choice is "auto", "none" or "required", and the tool that the client names, such as ("required", "add"); else "". Raises
    RefusedError if two tools have one name, or no answer could satisfy the choice.
    """
    tools, (how, name) = tuple(given), choice
    names = [tool.name for tool in tools]
    if twice := next((each for at, each in enumerate(names) if each in names[:at]), ""):
        raise RefusedError(f"tools has {twice!r} twice; give each tool a name of its own")
    if how not in ("auto", "none", "required"):
        raise RefusedError(f"tool_choice must be 'auto', 'none', 'required' or name one tool, got {how!r}")
    if how == "required" and not tools:
        raise RefusedError("tool_choice requires a call, but tools is empty; give the tools, or leave tool_choice out")
    if name and name not in names:
        raise RefusedError(f"tool_choice names {name!r}, which is not among tools: {', '.join(names)}")
    return {"tools": tools, "tool_choice": how, "tool_name": name}


def choice_of(got: str | dict[str, Any] | None, *, below: str = "") -> tuple[str, str]:
    """Read a `tool_choice` of OpenAI's APIs for `tools_wanted`; a function's name stands in the table itself, or in one `below` it."""
    if got is None or isinstance(got, str):
        return got or "auto", ""
    function = got.get(below) if below else got
    if got.get("type") == "function" and isinstance(function, dict) and isinstance(function.get("name"), str):
        return "required", function["name"]
    raise RefusedError(f"tool_choice must be 'auto', 'none', 'required' or name one function, got type {got.get('type')!r}")


def named(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Give each tool's result the name of its tool, from the call of the same id, where the result has none."""
    names = {call.id: call.name for message in messages for call in message.calls}
    return tuple(replace(m, name=names.get(m.call_id, "")) if m.role == "tool" and not m.name else m for m in messages)


def data(value: Any) -> bytes:
    """Write a server-sent event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """Write a server-sent event that is named as its `type`."""
    return b"event: " + value["type"].encode() + b"\n" + data(value)


def openai_error(message: str, *, status: int, param: str = "") -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param or None, "code": _CODES.get(status, kind)}}


def model_entry(name: str, created: float) -> dict[str, Any]:
    """Describe a model as clients of both OpenAI and Anthropic read it; `created` is when it was made, in seconds since the epoch."""
    return {
        "id": name, "object": "model", "type": "model", "lifecycle": "active", "display_name": name,
        "owned_by": "offbeat", "created": int(created),
        "created_at": datetime.fromtimestamp(int(created), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}


def list_models(created: Mapping[str, float], more: Mapping[str, Mapping[str, Any]] | None = None) -> bytes:
    """Write the answer of /v1/models: for each name, when the model was made, in seconds since the epoch, and `more` keys of it."""
    names = list(created)
    models = [{**model_entry(name, since), **(more or {}).get(name, {})} for name, since in created.items()]
    return msgspec.json.encode({
        "object": "list", "data": models, "has_more": False, "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None})
