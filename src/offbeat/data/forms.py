"""Forms of chats for chat templates, so that a template writes all of a chat. Called by `Tokenizer`, for training, prompts and agents.

A template may take text as lists of parts alone, know no system messages, or write no tools, calls and results. `find_form` tests it with
small chats, and `Form.write` converts a chat accordingly, e.g. a system message to the beginning of the user's first message. No I/O.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.data.chat_keys import THOUGHTS as REASONING
from offbeat.data.messages import for_template

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Tools], str | None]
"""Writes messages and tools with a template, and asks for no answer; None if the template refuses them."""

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_USER = {"role": "user", "content": "probe_user"}
_NESTED = {
    "type": "function", "function": {"name": "probe_tool", "description": "probe", "parameters": {
        "type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}}}}
_ARGUMENTS = {"probe_key": "probe_value"}


@dataclass(frozen=True)
class Form:
    """The form of chats for one template.

    Attributes:
        parts: roles whose text has to be a list of parts, such as [{"type": "text", "text": "hi"}].
        folds_system: whether a system message has to become part of the user's first.
        writes_calls: whether the template writes calls and results, and tools if the form was looked for with tools.
        flat_tools: whether tools have to be given without the `function` around them.
        arguments_as_text: whether a call's arguments have to be JSON text.
        reasoning: the template's key for an assistant's reasoning, such as "reasoning_content"; empty if it writes none.
    """

    parts: frozenset[str] = frozenset()
    folds_system: bool = False
    writes_calls: bool = True
    flat_tools: bool = False
    arguments_as_text: bool = False
    reasoning: str = REASONING[0]

    def write(self, messages: Messages, tools: Tools, *, in_words: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return a chat and its tools as the template takes them.

        Args:
            messages: text in `content`, and where they have them `tool_calls` and `reasoning_content`.
            in_words: always write tools, calls and results in Hermes' format.
        """
        if (in_words or not self.writes_calls) and uses_tools(messages, tools):
            messages, tools = _in_words(messages, tools), ()
        if self.folds_system:
            messages = _folded(messages)
        return [self._message(message) for message in messages], [_flat(tool) if self.flat_tools else nested(tool) for tool in tools]

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        given = for_template(message, arguments_as_text=self.arguments_as_text)
        written = {key: value for key, value in given.items() if key not in REASONING}
        if message["role"] in self.parts and isinstance(message["content"], str):
            written["content"] = [{"type": "text", "text": message["content"]}]
        if self.reasoning and (thoughts := given.get(REASONING[0])):
            written[self.reasoning] = thoughts
        return written


def find_form(render: Render, *, with_tools: bool) -> Form:
    """Find the form of a template by small chats, without or with tools, for which a tokenizer may have a template of its own."""
    given = (_NESTED,) if with_tools else ()
    probe = _Probe(render, given)
    user = probe.as_taken(_USER, [], [], "probe_user")
    # Asked after the user, since a template may refuse a chat that begins with the assistant.
    answer = probe.as_taken({"role": "assistant", "content": "probe_answer"}, [user], [], "probe_answer")
    system = probe.as_taken({"role": "system", "content": "probe_system"}, [], [user], "probe_system", "probe_user")
    folds = probe.shows([user], "probe_user") and not probe.shows([system, user], "probe_system")
    flattened = _Probe(render, (_flat(_NESTED),), probe.parts)
    flat = with_tools and not probe.shows([user], "probe_tool") and flattened.shows([user], "probe_tool")
    taken = flattened if flat else probe
    arguments_as_text = taken.find_arguments(user)
    writes_calls = arguments_as_text is not None and (not with_tools or taken.shows([user], "probe_tool"))
    reasoning = next((key for key in REASONING if probe.shows([user, {**answer, key: "probe_thought"}], "probe_thought")), "")
    return Form(frozenset(probe.parts), folds, writes_calls, flat, bool(arguments_as_text), reasoning)


@dataclass(frozen=True)
class _Probe:
    """Small chats that a template renders with some tools; `parts` grows by the roles whose messages it takes as a list of parts."""

    render: Render
    tools: Tools
    parts: set[str] = field(default_factory=set)

    def shows(self, messages: Messages, *texts: str) -> bool:
        """Whether all texts are in the rendering of a chat."""
        written = self.render(messages, self.tools)
        return written is not None and all(text in written for text in texts)

    def as_taken(
        self, message: Mapping[str, Any], before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], *texts: str,
    ) -> Mapping[str, Any]:
        """Return a message in the form in which the template writes these texts; its role is added to `parts` if that is a list."""
        listed = _in_parts(message)
        if self.shows([*before, message, *after], *texts) or not self.shows([*before, listed, *after], *texts):
            return message
        self.parts.add(message["role"])
        return listed

    def find_arguments(self, user: Mapping[str, Any]) -> bool | None:
        """Whether arguments have to be JSON text; None if the template writes no calls, or no results."""
        result = {"role": "tool", "content": "probe_result", "tool_call_id": "000000000", "name": "probe_tool"}
        for results in (result, _in_parts(result)):
            for as_text in (False, True):
                text = json.dumps(_ARGUMENTS)
                function = {"name": "probe_tool", "arguments": text if as_text else _ARGUMENTS}
                call = {"id": "000000000", "type": "function", "function": function}
                history = [user, {"role": "assistant", "content": "", "tool_calls": [call]}, results]
                if not self.shows(history, "probe_tool", "probe_key", "probe_value", "probe_result"):
                    continue
                # An object printed as Python is no JSON, and neither is text that was quoted once more.
                if self.shows(history, text) if as_text else not self.shows(history, "{'probe_key'"):
                    if results is not result:
                        self.parts.add("tool")
                    return as_text
        return None


def uses_tools(messages: Messages, tools: Tools) -> bool:
    """Whether a chat has tools, calls of them, or their results."""
    return bool(tools) or any(message.get("tool_calls") or message["role"] == "tool" for message in messages)


def nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the `function` around it that most templates look for."""
    is_flat = "function" not in tool and isinstance(tool.get("name"), str) and tool.get("type", "function") == "function"
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}} if is_flat else dict(tool)


def _flat(tool: Mapping[str, Any]) -> dict[str, Any]:
    return dict(tool["function"]) if isinstance(tool.get("function"), Mapping) else dict(tool)


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _in_words(messages: Messages, tools: Tools) -> list[Mapping[str, Any]]:
    """Put tools into the system message, calls into content, and results into messages of the user, in Hermes' format."""
    words: list[Mapping[str, Any]] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            words.append({"role": "user", "content": "\n".join(results)})
            results = []
        words.append(_with_calls(message) if message.get("tool_calls") else message)
    if results:
        words.append({"role": "user", "content": "\n".join(results)})
    if tools:
        told = _TOOLS.format(tools="\n".join(json.dumps(nested(tool), ensure_ascii=False) for tool in tools))
        first = words[0] if words and words[0]["role"] == "system" else None
        words[: 0 if first is None else 1] = [{"role": "system", "content": f"{first['content']}\n\n{told}" if first is not None else told}]
    return words


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"] if isinstance(call.get("function"), Mapping) else call
        arguments = function.get("arguments", {})
        written = (arguments or "{}") if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {written}}}\n</tool_call>')
    content = "\n".join(([message["content"]] if message["content"] else []) + calls)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _folded(messages: Messages) -> list[Mapping[str, Any]]:
    """Put the system message before the first user's, for templates that have none."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, *rest = messages
    at = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": system["content"]}, *rest]
    rest[at] = {**rest[at], "content": f"{system['content']}\n\n{rest[at]['content']}"}
    return rest
