"""Reads a whole text by a response template of transformers, in time that grows with the text alone. Called by `parsing`.

`transformers.utils.chat_parsing.parse_response` searches for the beginning of every field again after each field, so a text of many fields
takes quadratic time. A match ahead of the position stays the first one, and is kept here until it is passed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate


def read_response(
    text: str, template: Mapping[str, Any] | ResponseTemplate, *, prefix: str, tools: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the fields of a text, as `parse_response` does.

    Args:
        template: a response template, loaded or not, in which patterns of one field take linear time.
        prefix: the end of the prompt, which may have begun the answer.
        tools: their schemas cast arguments, such as "3" to 3.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: the text does not keep to the template.
    """
    return _WholeText(template, prefix=prefix, tools=list(tools)).read(text)  # type: ignore[reportArgumentType]


class _WholeText(ResponseParser):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ahead: dict[tuple[str, str], Any] = {}
        super().__init__(*args, **kwargs)

    def read(self, text: str) -> dict[str, Any]:
        self._buffer += text  # at once, because `feed` reads with matches that may still grow
        message, _ = self.finalize()
        return message

    def _scan(self, watch: list[Any], eos: bool) -> tuple[Any, int]:
        """Return the first match at or behind the position, the longest of those that begin there, and where the text ends."""
        if not eos:
            return super()._scan(watch, eos)
        found = [(kind, field, match) for kind, field in watch if (match := self._first(kind, field)) is not None]
        best = min(found, default=None, key=lambda one: (one[2].start(), -len(one[2].group()), one[0] != "open", one[1].name))
        return best, len(self._buffer)

    def _first(self, kind: str, field: Any) -> Any:
        key = kind, field.name
        match = self._ahead.get(key)
        if key not in self._ahead or (match is not None and match.start() < self._pos):
            pattern = field.open_re if kind == "open" else field.close_re
            match = self._ahead[key] = pattern.search(self._buffer, self._pos)
        return match
