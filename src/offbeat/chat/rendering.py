"""Messages to token ids, by the tokenizer's own chat template. Called by the recorder of agents and by the endpoints of chats.

`Renderer` gives the ids of a whole prompt, and those that a further turn adds, from the texts that training reads (`data.forms`). The
template writes tools if `parsing` can read its format; elsewhere they become text in Hermes' format. No I/O.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from offbeat.chat.formats import FORMATS, HERMES, ToolFormat, recognise
from offbeat.chat.messages import Message, Tool, ToolCall
from offbeat.data.text_positions import without_shared
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import DataError, ModelError, RefusedError

_SYSTEM, _USER = Message("system", "probe_system"), Message("user", "probe_user")
_MOST_CACHED = 64
"""Number of sets of tools whose rendering is remembered; a process serves few at a time."""


class Renderer:
    """Renders chats for one tokenizer.

    Attributes:
        format: the model's expected format of calls; None if only its tokenizer's response template shows it.
        response_template: the tokenizer's own template to read answers (see `transformers.utils.chat_parsing`); None if it has none.
        writes_tools: whether the template writes tools, calls and results itself, in a format that can be read.
        generation_prompt: the text that precedes an answer, e.g. "<|im_start|>assistant" and a line end.
        end_of_turn: the token that the template writes after an answer, [1] token ids; empty if that is no special token.
    """

    def __init__(self, tokenizer: Tokenizer, *, tool_format: str = "") -> None:
        """Find out the abilities of the template.

        Args:
            tool_format: name of a format in `formats`, such as "hermes", for a template without marks; empty recognises it.

        Raises:
            ModelError: there is no chat template, it fails on the simplest chat, or the format is unknown or not to be had.
        """
        self.tokenizer = tokenizer
        self.writes_tools = True  # until the tests of the template below
        self.format: ToolFormat | None = None
        self.response_template: dict[str, Any] | None = getattr(tokenizer.hf, "response_template", None)
        self._cache: dict[bytes, str] = {}
        plain = self._prompt_text([_USER], to_answer=False)
        self.generation_prompt = without_shared(self._prompt_text([_USER], to_answer=True), plain)
        self.format = self._format(tool_format)
        readable = self.format is not None or self.response_template is not None
        self.writes_tools = readable and tokenizer.form(with_tools=True).writes_calls
        if not self.writes_tools:
            if tool_format not in ("", HERMES.name):
                raise ModelError(
                    f"the chat template of tokenizer {tokenizer.name!r} writes no tools, so the tool format must be {HERMES.name!r},"
                    f" which is put into the system message; got {tool_format!r}")
            self.format, self.response_template = HERMES, None
        end = tokenizer.end_of_turn_id
        self.end_of_turn: tuple[int, ...] = () if end is None else (end,)
        self._end_text = "" if end is None else next(text for text, index in tokenizer.special_tokens.items() if index == end)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opening: str = "") -> list[int]:
        """Return the token ids of a chat up to the assistant's answer, and of `opening`, the answer's forced beginning.

        Raises:
            RefusedError: the arguments of a past call are no JSON object, or an image cannot be used.
            ModelError: the template refuses these messages.
        """
        ids = self.tokenizer.encode(self._prompt_text(messages, tools, to_answer=True))
        return [*self._with_images(ids, messages), *self.opening_ids(opening)]

    def following(self, answer: Message, new: Sequence[Message], tools: Sequence[Tool] = (), *, opening: str = "") -> list[int] | None:
        """Return the token ids between the token that ended the assistant's turn and its next answer.

        They are taken from a short chat that ends with `answer`, so that the tokens sampled before stay unchanged.

        Args:
            answer: the assistant's message; only its calls matter, whose ids and names some templates write beside their results.
            new: the messages since, of users and tools.

        Returns:
            None if they are unknown: `new` has messages of others, or the template changes the text before an answer when messages
            follow, or ends answers with no special token. The chat then has to be rendered as a whole.

        Raises:
            RefusedError: an image in `new` cannot be used.
        """
        if not self._end_text or not new or any(message.role not in ("user", "tool") for message in new):
            return None
        tools = tools if self.writes_tools else ()  # else they are in the system message alone
        calls = tuple(ToolCall(call.id, call.name, "{}") for call in answer.calls)
        dummy = Message("assistant", "" if calls else "probe_answer", calls)
        try:
            text = self._prompt_text([_SYSTEM, _USER, dummy, *new], tools, to_answer=True)
        except ModelError:
            return None
        before = self._before(tools)
        if not text.startswith(before):  # it may hold a date, and a day have passed
            self._cache.clear()
            before = self._before(tools)
        at = text.find(self._end_text, len(before))
        if not text.startswith(before) or at < 0:
            return None
        # The end token is encoded with the rest, because some tokenizers treat the beginning of a text differently.
        return [*self._with_images(self.tokenizer.encode(text[at:])[1:], new), *self.opening_ids(opening)]

    def _with_images(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Return the ids of messages with the tokens of their images in the places of the model's image token."""
        images, reader = [image for message in messages for image in message.images], self.tokenizer.images
        if reader is None:
            if images:
                counted = "an image" if len(images) == 1 else f"{len(images)} images"
                raise RefusedError(f"the chat has {counted}, and this model reads text alone here; send text")
            return ids
        try:
            return reader.expand(ids, images, where="the chat")[0].tolist()
        except DataError as exc:
            raise RefusedError(str(exc)) from exc

    def opening_ids(self, opening: str) -> list[int]:
        """Return the token ids of an answer's forced beginning."""
        return self.tokenizer.encode_continuation(opening) if opening else []

    def opening(self, tool_choice: str, tool_name: str = "") -> str:
        """Return the beginning of an answer that has to be a call, e.g. "[TOOL_CALLS]"; empty if nothing is forced.

        Args:
            tool_name: the only tool that may be called; empty allows all.

        Raises:
            RefusedError: the model's format of calls is not known well enough.
        """
        if tool_choice != "required":
            return ""
        if self.format is None:
            raise RefusedError(
                f"tool_choice {tool_name or tool_choice!r} cannot be forced, because it is not known how this model begins a call;"
                " use 'auto'")
        think = "\n</think>\n\n" if self.thinks_first else ""
        return think + (self.format.named_call.replace("{name}", tool_name) if tool_name else self.format.some_call)

    @property
    def thinks_first(self) -> bool:
        """Whether the template itself begins an answer with the tag of reasoning."""
        return self.generation_prompt.rstrip().endswith("<think>")

    def _format(self, name: str) -> ToolFormat | None:
        if not name:
            templates = self.tokenizer.hf.chat_template
            return recognise("\n".join(templates.values()) if isinstance(templates, dict) else str(templates))
        self.response_template = None
        known = {form.name: form for form in (*FORMATS, HERMES)}
        if name not in known:
            raise ModelError(f"the tool format {name!r} is unknown; use one of {', '.join(sorted(known))}, or leave it empty")
        return known[name]

    def _before(self, tools: Sequence[Tool]) -> str:
        """Render the text before the dummy answer; remembered by tools."""
        key = json.dumps([(tool.name, tool.description, dict(tool.parameters)) for tool in tools]).encode()
        if key not in self._cache:
            if len(self._cache) >= _MOST_CACHED:
                self._cache.clear()
            self._cache[key] = self._prompt_text([_SYSTEM, _USER], tools, to_answer=False)
        return self._cache[key]

    def _prompt_text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, to_answer: bool) -> str:
        return self.tokenizer.chat_text(
            [self._written(message) for message in messages], tools=[tool_json(tool) for tool in tools], to_answer=to_answer,
            in_words=not self.writes_tools)

    def _written(self, message: Message) -> dict[str, Any]:
        """Write a message as templates expect it, with text even where there is none: several templates fail on null."""
        written: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "assistant":
            if message.calls:
                written["tool_calls"] = [self._call_json(call) for call in message.calls]
            if message.reasoning:
                written["reasoning_content"] = message.reasoning
        elif message.role == "tool":
            written |= {"tool_call_id": self._id(message.call_id), "name": message.name}
        return written

    def _call_json(self, call: ToolCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": arguments_of(call)}
        return {"id": self._id(call.id), "type": "function", "function": function}

    def _id(self, call_id: str) -> str:
        size = self.format.id_chars if self.format is not None else 0
        return re.sub(r"[^a-zA-Z0-9]", "", call_id)[-size:].rjust(size, "0") if size else call_id


def tool_json(tool: Tool) -> dict[str, Any]:
    """Describe a tool as templates expect it."""
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}}


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Return a call's arguments as an object; none are an empty one. Raises RefusedError if they are no JSON object."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as exc:
        raise RefusedError(f"the arguments of the call {call.id!r} of {call.name!r} are not JSON: {exc}") from exc
    if not isinstance(arguments, dict):
        raise RefusedError(f"the arguments of the call {call.id!r} of {call.name!r} must be a JSON object, got {call.arguments[:80]!r}")
    return arguments
