"""Requests with each field of an API, and what the table of fields says of them; for tests of servers."""

from collections.abc import Iterator
from typing import Any

from offbeat.chat.fields import FIELDS, Api, Field, Surface

BASES: dict[Api, tuple[str, dict[str, Any]]] = {
    "chat completions": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
    "completions": ("/v1/completions", {"prompt": "12", "max_tokens": 2}),
    "Responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
    "Messages": ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
}
_NO_PARAMETERS = {"type": "object", "properties": {}}
_SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "integer"}}
_FUNCTION = {"name": "add", "parameters": _NO_PARAMETERS}
_RIGHT: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 5, "seed": 3, "n": 2, "logprobs": 1, "top_logprobs": 2, "stop": "x",
    "stop_sequences": ["x"], "stream": True, "stream_options": {"include_usage": True}, "stream_options.include_usage": True,
    "return_token_ids": True, "return_routed_experts": False, "return_supports": True,
    "max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2,
    "model": None,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "min_p": 0.1, "min_tokens": 1, "logit_bias": {"3": 1},
    "allowed_token_ids": [3, 4], "bad_words": ["x"], "stop_token_ids": [3], "ignore_eos": True, "scaled_logprobs": True,
    "structured_outputs": {"choice": ["1"]}, "structured_outputs.json": {"type": "integer"}, "structured_outputs.regex": "[0-9]",
    "structured_outputs.choice": ["1"], "structured_outputs.grammar": 'start: "1"', "structured_outputs.json_object": False,
    "guided_json": {"type": "integer"}, "guided_regex": "[0-9]", "guided_choice": ["1"], "guided_grammar": 'start: "1"',
    "response_format": {"type": "json_schema", "schema": {"type": "integer"}},
    "text": {"format": {"type": "text"}}, "text.format": _SCHEMA, "output_format": _SCHEMA,
    "output_config": {"effort": "low"}, "output_config.format": _SCHEMA, "output_config.effort": "low",
    "chat_template_kwargs": {"a": 1}, "tools": [], "tool_choice": None, "parallel_tool_calls": False, "reasoning_effort": "low",
    "reasoning": {"effort": "low"}, "reasoning.effort": "low", "thinking": {"type": "disabled"}, "echo": True, "prompt_logprobs": 1,
    "begun_tokens": 1,
    "encoding_format": "base64", "include_stop_str_in_output": True, "instructions": "x", "system": "x",
    "include": ["message.output_text.logprobs"], "prompt": "2", "input": "x", "messages": [{"role": "user", "content": "x"}]}
"""A value of each field that acts somewhere, with which a request is served."""
_RIGHT_OF: dict[tuple[Api, str], Any] = {
    ("chat completions", "tools"): [{"type": "function", "function": _FUNCTION}],
    ("Responses", "tools"): [{"type": "function", **_FUNCTION}],
    ("Messages", "tools"): [{"name": "add", "input_schema": _NO_PARAMETERS}], ("chat completions", "tool_choice"): "none",
    ("Responses", "tool_choice"): "none", ("Messages", "tool_choice"): {"type": "none"}}
_WRONG = [None]
"""No field takes a list of null; one that is read says so, and one that is dropped does not."""


def field_requests(surface: Surface) -> Iterator[tuple[str, dict[str, Any], str, int]]:
    """Yield path, body, name of the field and the status to expect.

    A field that acts is sent with a right and a wrong value, one that is refused also with the values that change nothing.
    """
    for api, (path, base) in BASES.items():
        for name, field in FIELDS[api].items():
            outer, _, inner = name.partition(".")
            if FIELDS[api][outer].use(surface) != "refused" or not inner:
                for value, status in _values(api, field, surface):
                    yield path, {**base, outer: {inner: value} if inner else value}, name, status
        if any(field.use(surface) for field in FIELDS[api].values()):
            yield path, {**base, "no_such_field": 1}, "no_such_field", 400


def _values(api: Api, field: Field, surface: Surface) -> list[tuple[Any, int]]:
    """Values of a field, and the status that each is answered with."""
    match field.use(surface):
        case "acts":
            return [(_RIGHT_OF.get((api, field.name), _RIGHT[field.name]), 200), (_WRONG, 400)]
        case "run":
            return [(_RIGHT[field.name], 200)]
        case "harmless":
            return [("some", 200)]
        case "refused":
            return [("some", 400), *((value, 200) for value in field.neutral)]
    return []
