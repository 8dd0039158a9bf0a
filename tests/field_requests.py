"""A request for each field of an API, and what the table of fields says of it; for tests of servers."""

from collections.abc import Iterator
from typing import Any

from offbeat.chat.fields import FIELDS, Api, Surface

BASES: dict[Api, tuple[str, dict[str, Any]]] = {
    "chat completions": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
    "completions": ("/v1/completions", {"prompt": "1", "max_tokens": 2}),
    "Responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
    "Messages": ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
}
_OF_THE_RUN = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 5, "seed": 3, "reasoning_effort": "low", "reasoning.effort": "low",
    "output_config.effort": "low", "thinking": {"type": "disabled"}}


def field_requests(surface: Surface) -> Iterator[tuple[str, dict[str, Any], str, int]]:
    """Yield path, body, name of the field and the status to expect, for fields that are refused, harmless, the run's, or unknown."""
    for api, (path, base) in BASES.items():
        for name, field in FIELDS[api].items():
            use, (outer, _, inner) = field.use(surface), name.partition(".")
            if use in ("refused", "harmless") and (not inner or FIELDS[api][outer].use(surface) != "refused"):
                yield path, {**base, outer: {inner: "some"} if inner else "some"}, name, 400 if use == "refused" else 200
            elif use == "run":
                yield path, {**base, outer: {inner: _OF_THE_RUN[name]} if inner else _OF_THE_RUN[name]}, name, 200
        if any(field.use(surface) for field in FIELDS[api].values()):
            yield path, {**base, "no_such_field": 1}, "no_such_field", 400
