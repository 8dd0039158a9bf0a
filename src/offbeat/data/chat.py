"""A chat as supervised fine-tuning sees it: the tokens that a model would have seen and written, and which of them it would have written.

Called by `data.supervised`. Where the template has `{% generation %}` spans, they mark what the assistant writes; elsewhere it is whatever
a rendering with the answer adds to the rendering that asks for it. The token that ends the turn is part of it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from offbeat.data.messages import is_learnt
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import DataError

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class MarkedText:
    """A chat as rendered by its template.

    Attributes:
        spans: ranges of characters that the assistant wrote and that are trained on, ascending; text before them is given.
        is_open: whether the last span lacks the token that ends a turn.
    """

    text: str
    spans: tuple[Span, ...]
    is_open: bool

    def sequence(self, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Encode the text up to the end of the last span, including the end token: tokens [L] int32 and loss_mask [L] bool.

        The text is encoded as a whole, or in parts where a token would cross the edge of a span: a model that answers sees its prompt
        encoded without the answer, so no token may hold some of both.
        """
        text = self.text[: self.spans[-1][1]]
        bounds = sorted({0, *(edge for span in self.spans for edge in span)})
        encoding = tokenizer.hf.backend_tokenizer.encode(text, add_special_tokens=False)
        ids, ends = np.array(encoding.ids, np.int64), np.array([end for _, end in encoding.offsets], np.int64)
        # Offsets may leave out white space before a token, which then belongs to that token.
        starts = np.minimum([start for start, _ in encoding.offsets], np.concatenate([[0], ends[:-1]]))
        if all(not ((starts < edge) & (edge < ends)).any() for edge in bounds):
            mask = np.zeros(len(ids), bool)
            for start, end in self.spans:
                mask |= (starts >= start) & (ends <= end)
        else:
            pieces = [(tokenizer.encode(text[low:high]), (low, high) in self.spans) for low, high in pairwise(bounds)]
            ids = np.array([token for piece, _ in pieces for token in piece], np.int64)
            mask = np.repeat([trained for _, trained in pieces], [len(piece) for piece, _ in pieces])
        if self.is_open:
            ids, mask = np.append(ids, tokenizer.eos_token_id), np.append(mask, True)
        return ids.astype(np.int32), mask


def mark_answers(
    messages: Messages, tokenizer: Tokenizer, *, turns: Literal["all", "last"], first: int = 1, tools: Sequence[Mapping[str, Any]] = (),
) -> list[MarkedText]:
    """Return what a chat teaches: one text, or several where the template writes a turn differently once others follow it.

    Such a template (one that drops the reasoning of earlier turns) shows a model other tokens to continue from than it wrote itself, so
    each turn becomes a text of its own, as it was when the turn was written.

    Args:
        messages: each with `role` and `content`. A first message by the assistant answers nothing and is not trained on.
        turns: which of the assistant's messages are trained on.
        first: index from which on messages can be trained on, at least 1; those before are given.
        tools: descriptions of functions that the assistant may call, for templates that write them.

    Raises:
        DataError: no message is the assistant's, one is empty, or the template omits it or changes what precedes it.
        ModelError: there is no chat template, or it refuses these messages.
    """
    answers = [index for index, message in enumerate(messages) if index >= first and is_learnt(message)]
    if not answers:
        raise DataError("the chat has no message of the assistant that answers another, so there is nothing to imitate")
    parts: list[MarkedText] = []
    for index in answers if turns == "all" else answers[-1:]:
        part = _answer(messages, index, tokenizer, tools)
        if parts and part.text.startswith(parts[-1].text):
            part = MarkedText(part.text, parts.pop().spans + part.spans, part.is_open)
        parts.append(part)
    return parts


def _answer(messages: Messages, index: int, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> MarkedText:
    """Render the chat up to the assistant's message at `index`, and mark that message."""
    calls = bool(messages[index].get("tool_calls"))
    if not messages[index]["content"].strip() and not calls:
        raise DataError(f"message {index} of the chat, the assistant's, is empty; there is nothing to imitate")
    text = tokenizer.chat_text(messages[: index + 1], tools=tools, to_answer=False)
    is_marked = _MARKS.search(str(tokenizer.hf.get_chat_template())) is not None
    before = tokenizer.chat_text(messages[:index], tools=tools, to_answer=not is_marked)
    if not text.startswith(before):
        raise DataError(
            f"the chat template of tokenizer {tokenizer.name!r} writes what precedes message {index} differently once that message is"
            " there, so that no token can be told to be the assistant's; mark its messages with {% generation %} in the template")
    spans = [(len(before), len(text))] if not is_marked else [
        span for span in _marked_spans(messages[: index + 1], text, tokenizer, tools) if span[0] >= len(before)]
    spans = [(start, end) for start, end in spans if text[start:end].strip()]
    if not spans:
        raise DataError(
            f"message {index} of the chat, the assistant's, does not show in what the chat template of tokenizer {tokenizer.name!r} writes")
    # Calls come after the content, and a token that marks them is no end.
    end = _end_of_turn(text, spans[-1][0], None if calls else messages[index]["content"], tokenizer)
    return MarkedText(text, (*spans[:-1], (spans[-1][0], end or spans[-1][1])), is_open=end is None)


def _marked_spans(messages: Messages, text: str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> list[Span]:
    names: dict[str, Any] = {**tokenizer.hf.special_tokens_map, **tokenizer.template_kwargs}
    rendered: Any = render_jinja_template(
        [[dict(message) for message in messages]], tools=[dict(tool) for tool in tools] or None,
        chat_template=str(tokenizer.hf.get_chat_template()), return_assistant_tokens_mask=True, **names)
    [again], [spans] = rendered
    assert again == text, f"the chat template of tokenizer {tokenizer.name!r} gives another text when its spans are asked for"
    return [(start, end) for start, end in spans]


def _end_of_turn(text: str, start: int, content: str | None, tokenizer: Tokenizer) -> int | None:
    """Find the end of the token that ends the turn; None if the turn ends without one.

    It is the added token right after the message: generation stops there, and what the template writes after it is never generated. Where
    the template has changed the message, or `content` is None, it is the last added token at the end of the text.
    """
    added = sorted(map(str, tokenizer.hf.added_tokens_decoder.values()), key=len, reverse=True)
    token = "|".join(map(re.escape, added))
    said = -1 if content is None else text.find(content.strip(), start)
    if content is not None and said >= 0:
        after = said + len(content.strip())
        if not text[after:].strip():
            return None
        if found := re.compile(rf"\s*({token})").match(text, after):
            return found.end()
    found = re.compile(rf"({token})\s*\Z").search(text, start)
    return found.end(1) if found else None
