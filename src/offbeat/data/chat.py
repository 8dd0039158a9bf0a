"""Chats for training: the tokens of prompts and answers as generation has them, and a mask of those that the model writes.

Called for supervised fine-tuning, preferences and reward models. A text begins with the prompt that generation would get, and goes on with
the template's text of the answer up to the token that ends its turn. Positions (`data.text_positions`) separate the two, never a search in
the text. The `{% generation %}` marks of a template, if it has them, choose the trained part of an answer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from offbeat.data.forms import REASONING
from offbeat.data.image_sources import MARK
from offbeat.data.messages import is_learnt
from offbeat.data.text_positions import Place, SoughtTexts, find_places, without_shared
from offbeat.data.thoughts import CLOSED, OPENED, close_thought, skip_empty, split_thought, write_thought
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import DataError, ModelError

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_AHEAD = 64
"""Characters of an answer that are encoded with the end of its prompt, to see whether a token would hold some of both."""


@dataclass(frozen=True)
class MarkedText:
    """A chat as rendered by its template, up to the end of the last turn that is trained on.

    Attributes:
        spans: ranges of the assistant's characters that are trained on, ascending, such as ((120, 164),); text before them is given.
        is_open: whether the last span lacks the token that ends a turn.
        asked: number of characters of the prompt that the last turn answers.
    """

    text: str
    spans: tuple[Span, ...]
    is_open: bool
    asked: int

    def sequence(self, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Encode the text, including the end token: tokens [L] int32 and loss_mask [L] bool.

        The text is encoded as a whole, or in parts where a token would cross the edge of a span: generation encodes the prompt without the
        answer, so no token may hold some of both.
        """
        bounds = sorted({0, *(edge for span in self.spans for edge in span)})
        encoding = tokenizer.hf.backend_tokenizer.encode(self.text, add_special_tokens=False)
        ids, ends = np.array(encoding.ids, np.int64), np.array([end for _, end in encoding.offsets], np.int64)
        # Offsets may leave out white space before a token, which then belongs to that token.
        starts = np.minimum([start for start, _ in encoding.offsets], np.concatenate([[0], ends[:-1]]))
        crosses = any(((starts < edge) & (edge < ends)).any() for edge in bounds)
        if not crosses and joins_well(self.text, self.asked, tokenizer):
            mask = np.zeros(len(ids), bool)
            for start, end in self.spans:
                mask |= (starts >= start) & (ends <= end)
        else:
            ids, mask = self._in_parts(tokenizer)
        if self.is_open:
            ids, mask = np.append(ids, tokenizer.eos_token_id), np.append(mask, True)
        return ids.astype(np.int32), mask

    def _in_parts(self, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
        """Encode the last prompt as generation gets it, and each part of its answer by itself: tokens [L] int64 and loss_mask [L] bool."""
        earlier = [span for span in self.spans if span[1] <= self.asked]
        encoding = tokenizer.hf.backend_tokenizer.encode(self.text[: self.asked], add_special_tokens=False)
        ends = np.array([end for _, end in encoding.offsets], np.int64)
        starts = np.minimum([start for start, _ in encoding.offsets], np.concatenate([[0], ends[:-1]]))
        mask = np.zeros(len(ends), bool)
        for start, end in earlier:
            mask |= (starts >= start) & (ends <= end)
        bounds = sorted({self.asked, *(edge for span in self.spans if span[1] > self.asked for edge in span)})
        pieces = [(tokenizer.encode_continuation(self.text[low:high]), (low, high) in self.spans) for low, high in pairwise(bounds)]
        ids = np.array([*encoding.ids, *(token for piece, _ in pieces for token in piece)], np.int64)
        return ids, np.concatenate([mask, np.repeat([trained for _, trained in pieces], [len(piece) for piece, _ in pieces])])


@dataclass(frozen=True)
class _Answer:
    """One answer in the template's rendering.

    Attributes:
        text: the prompt, the answer, and the template's text after it.
        asked: number of characters of the prompt.
        last: where the last of the assistant's texts ends.
        as_written: whether `text` is the template's whole rendering.
    """

    text: str
    asked: int
    last: int
    as_written: bool


def mark_answers(
    messages: Messages, tokenizer: Tokenizer, *, turns: Literal["all", "last"], first: int = 1, tools: Tools = (),
) -> list[MarkedText]:
    """Return the texts that a chat trains: one, or several where the template writes a turn differently once others follow it.

    Such a template (e.g. one that drops the reasoning of earlier turns) shows a model other tokens to continue from than it wrote itself,
    so each turn becomes a text of its own, as it was when the turn was written.

    Args:
        messages: each with `role` and `content`. A first message by the assistant answers nothing and is not trained on.
        turns: which of the assistant's messages are trained on.
        first: index from which on messages can be trained on, at least 1; those before are given.
        tools: descriptions of functions that the assistant may call.

    Raises:
        DataError: no message is the assistant's, one is empty, or the template omits it, something before it, or its prompt.
        ModelError: there is no chat template, or it refuses these messages.
    """
    answers = [index for index, message in enumerate(messages) if index >= first and is_learnt(message)]
    if not answers:
        raise DataError("the chat has no message of the assistant that answers another, so there is nothing to imitate")
    check_shown(messages[: answers[-1]], tokenizer, tools)
    parts: list[MarkedText] = []
    for index in answers if turns == "all" else answers[-1:]:
        part = _mark(messages, index, tokenizer, tools)
        if parts and _continues(part, parts[-1], tokenizer):
            part = MarkedText(part.text, parts.pop().spans + part.spans, part.is_open, part.asked)
        parts.append(part)
    return parts


def check_shown(messages: Messages, tokenizer: Tokenizer, tools: Tools = ()) -> None:
    """Refuse a prompt that the template does not write in full, but for the reasoning of earlier answers; errors as of `mark_answers`."""
    written, given = tokenizer.written(messages, tools)
    text, render = tokenizer.render(written, given), partial(_rendered, tokenizer, to_answer=True)
    for place in find_places(text, render, written, given, sought=SoughtTexts(reasoning=False)):
        role = "tool" if place.message < 0 else written[place.message]["role"]
        if tokenizer.images is not None and MARK in place.said and all(part.strip() in text for part in place.said.split(MARK)):
            continue  # templates may write other signs before an image than before a text, which hides marks
        # Templates may leave out the reasoning of an earlier answer, but not its result.
        if not place.shows and not (role == "assistant" and place.kind == "content" and place.end is not None):
            what = "the tools" if place.message < 0 else f"the text of a message with role {role!r}"
            raise DataError(
                f"the chat template of tokenizer {tokenizer.name!r} does not write {what} of the chat, {place.said.strip()[:60]!r}, so the"
                " model would not see it; leave it out, or set data.chat_template to a template that writes it")


def judged_text(messages: Messages, tokenizer: Tokenizer, *, tools: Tools = ()) -> str:
    """Return a chat that ends with the assistant's message as a reward model reads it: as the template writes it.

    Where the template leaves out a part of the answer, or writes it unlike generation, it is the text up to the end of the answer's turn.
    Errors as of `mark_answers`.
    """
    if not messages[-1]["content"].strip() and not messages[-1].get("tool_calls"):  # a sample may end at once
        return tokenizer.chat_text(messages, tools=tools, to_answer=False)
    check_shown(messages[:-1], tokenizer, tools)
    answer = _read_answer(messages, len(messages) - 1, tokenizer, tools)
    if answer.as_written:
        return answer.text
    end = _end_of_turn(answer, messages, len(messages) - 1, tokenizer, tools)
    return answer.text + str(tokenizer.hf.eos_token) if end is None else answer.text[:end]


def joins_well(text: str, at: int, tokenizer: Tokenizer) -> bool:
    """Whether the tokens of a text up to a position are the same without the text behind. Looks only at the text around it."""
    start = max((found.end() for found in tokenizer.added_pattern.finditer(text, max(at - 4 * _AHEAD, 0), at)), default=max(at - _AHEAD, 0))
    before = tokenizer.encode(text[start:at])
    return tokenizer.encode(text[start : at + _AHEAD])[: len(before)] == before


def _continues(part: MarkedText, before: MarkedText, tokenizer: Tokenizer) -> bool:
    """Whether a turn can be trained on in the sequence of the next one."""
    return (
        part.text.startswith(before.text) and joins_well(before.text, before.asked, tokenizer)
        and joins_well(part.text, len(before.text), tokenizer))


def _mark(messages: Messages, index: int, tokenizer: Tokenizer, tools: Tools) -> MarkedText:
    """Render the chat up to the assistant's message at `index`, and mark that message."""
    answer = _read_answer(messages, index, tokenizer, tools)
    end = _end_of_turn(answer, messages, index, tokenizer, tools)
    spans = [(answer.asked, len(answer.text))]
    if answer.as_written and _MARKS.search(tokenizer.template(with_tools=bool(tools))):
        spans = _marked_spans(messages, index, answer, tokenizer, tools)
    last = spans[-1][0], len(answer.text) if end is None else end
    return MarkedText(answer.text[: last[1]], (*spans[:-1], last), end is None, answer.asked)


def _marked_spans(messages: Messages, index: int, answer: _Answer, tokenizer: Tokenizer, tools: Tools) -> list[Span]:
    text, found = tokenizer.generated(*tokenizer.written(messages[: index + 1], tools))
    spans = [(max(start, answer.asked), end) for start, end in found if end > answer.asked and text[start:end].strip()]
    if text != answer.text or not spans:
        raise DataError(
            f"the chat template of tokenizer {tokenizer.name!r} has generation marks, and message {index} of the chat, the assistant's, is"
            " not between them")
    first, end = spans[0]
    if not text[answer.asked : first].strip() or skip_empty(text, answer.asked, first) == first:
        first = answer.asked  # a model has to write this itself, since its prompt does not have it
    return [(first, end), *spans[1:]]


def _read_answer(messages: Messages, index: int, tokenizer: Tokenizer, tools: Tools) -> _Answer:
    """Find the answer at `index` after the prompt that it answers."""
    message = messages[index]
    if not any(message.get(key) for key in ("tool_calls", REASONING[0])) and not message["content"].strip():
        raise DataError(f"message {index} of the chat, the assistant's, is empty; there is nothing to imitate")
    asked = tokenizer.chat_text(messages[:index], tools=tools)
    text, places = _places(messages[:index], message, tokenizer, tools)
    is_whole = _is_whole(message, places)
    if is_whole and text.startswith(asked):
        return _Answer(text, len(asked), _last(places), as_written=True)
    thoughts, rest = split_thought(message["content"], asked)
    bare = {**{key: value for key, value in message.items() if key != REASONING[0]}, "content": rest}
    found = _with_thoughts(
        messages[:index], bare, "\n".join(filter(None, (message.get(REASONING[0], ""), thoughts))), asked, tokenizer, tools)
    if found is None and is_whole:
        found = _after_header(messages[:index], asked, text, places, tokenizer, tools)
    if found is not None:
        return found
    if CLOSED.search(asked) and (thoughts or message.get(REASONING[0])):
        raise DataError(
            f"message {index} of the chat, the assistant's, has reasoning, and the chat template of tokenizer {tokenizer.name!r} asks for"
            " an answer without; leave it out, or let the template ask for it in data.chat_template_kwargs, as {enable_thinking = true}")
    if missing := next((place for place in places if not place.shows), None):
        raise DataError(
            f"message {index} of the chat, the assistant's, does not show in what the chat template of tokenizer {tokenizer.name!r} writes:"
            f" {missing.said.strip()[:60]!r} is left out or changed; set data.chat_template to a template that writes it")
    raise DataError(
        f"the chat template of tokenizer {tokenizer.name!r} writes what precedes message {index} differently once that message is"
        " there, so that no token can be told to be the assistant's; set data.chat_template to one whose prompt for an answer is what it"
        " writes before the answer")


def _with_thoughts(
    before: Messages, bare: Mapping[str, Any], thoughts: str, asked: str, tokenizer: Tokenizer, tools: Tools,
) -> _Answer | None:
    """Continue a prompt that opens or closes a thought, or write thoughts that the template leaves out; None if neither applies."""
    opened, closed = OPENED.search(asked), CLOSED.search(asked)
    if opened is not None and (found := _in_opened(before, bare, thoughts, asked, opened.group().strip(), tokenizer, tools)):
        return found
    block = opened or closed
    base = asked if block is None else asked[: block.start()]
    if (block is None and not thoughts) or (closed is not None and thoughts):
        return None
    text, places = _places(before, bare, tokenizer, tools)
    if not text.startswith(base) or not all(place.shows for place in places):
        return None
    first = min((place.start for place in places if place.start is not None and place.kind == "content"), default=len(text))
    skipped = skip_empty(text, len(base), first)
    own = write_thought(thoughts) if block is None else "" if opened is None else close_thought(opened.group(), thoughts)
    shift = len(asked) + len(own) - skipped
    ends = _last(places) if places else len(base)
    return _Answer(asked + own + text[skipped:], len(asked), max(ends + shift, len(asked) + len(own.rstrip())), as_written=False)


def _in_opened(
    before: Messages, bare: Mapping[str, Any], thoughts: str, asked: str, opening: str, tokenizer: Tokenizer, tools: Tools,
) -> _Answer | None:
    """Continue a prompt that opens a thought with the template's text from the thought on; None if it writes no thoughts."""
    said = thoughts.strip() or "\U0002a6d1"  # an empty thought is one whose only character is taken out
    text, places = _places(before, {**bare, REASONING[0]: said}, tokenizer, tools)
    reasoning = next((place for place in places if place.kind == "reasoning" and place.shows), None)
    if reasoning is None or reasoning.start is None or not all(place.shows for place in places):
        return None
    if not text[: reasoning.start].rstrip().endswith(opening):
        return None
    if any(place.start is not None and place.start < reasoning.start for place in places):
        return None  # such as calls before the thought, which the prompt has opened already
    start = reasoning.start if thoughts.strip() else reasoning.start + len(said)
    return _Answer(asked + text[start:], len(asked), _last(places) - start + len(asked), as_written=False)


def _after_header(before: Messages, asked: str, text: str, places: Sequence[Place], tokenizer: Tokenizer, tools: Tools) -> _Answer | None:
    """Continue the prompt where the template writes the same header before the answer, and something else before that."""
    first = places[0]
    if first.kind == "call" or first.start is None:
        return None
    header = without_shared(asked, tokenizer.chat_text(before, tools=tools, to_answer=False))
    if not header.strip() or not text[: first.start].endswith(header):
        return None
    return _Answer(asked + text[first.start:], len(asked), _last(places) - first.start + len(asked), as_written=False)


def _places(before: Messages, message: Mapping[str, Any], tokenizer: Tokenizer, tools: Tools) -> tuple[str, list[Place]]:
    """Render a chat that ends with a message, and find that message's texts."""
    written, given = tokenizer.written([*before, message], tools)
    text, render = tokenizer.render(written, given, to_answer=False), partial(_rendered, tokenizer, to_answer=False)
    places = find_places(text, render, written, given, sought=SoughtTexts(message=len(written) - 1))
    return text, sorted(places, key=lambda place: (place.kind != "reasoning", place.kind == "call"))


def _is_whole(message: Mapping[str, Any], places: Sequence[Place]) -> bool:
    """Whether all that a message says is written."""
    writes_thoughts = any(place.kind == "reasoning" for place in places)
    return bool(places) and all(place.shows for place in places) and (writes_thoughts or not message.get(REASONING[0]))


def _rendered(tokenizer: Tokenizer, messages: Messages, tools: Tools, *, to_answer: bool) -> str | None:
    try:
        return tokenizer.render(messages, tools, to_answer=to_answer)
    except ModelError:
        return None


def _last(places: Sequence[Place]) -> int:
    return max(place.end for place in places if place.end is not None)


def _end_of_turn(answer: _Answer, messages: Messages, index: int, tokenizer: Tokenizer, tools: Tools) -> int | None:
    """Find the end of the token that ends the turn; None if the turn ends without one.

    It is the added token right after the message, such as "<|im_end|>": generation stops there, and never gives the template's text after
    it. Tokens that only mark calls or close a part of the answer are no ends, so where something stands between, it is the first that also
    ends answers of text, else the last that the template writes while it does not ask for an answer.
    """
    pattern = tokenizer.added_pattern
    calls = bool(messages[index].get("tool_calls"))
    direct = re.compile(rf"\s*(?:{pattern.pattern})").match(answer.text, answer.last) if not calls else None
    if direct:
        return direct.end()
    limit = len(answer.text)
    if answer.as_written and (more := _rendered(tokenizer, *tokenizer.written(messages[: index + 1], tools), to_answer=True)) is not None:
        same = limit - len(without_shared(answer.text, more))
        limit = same if same > answer.last else limit
    found = list(pattern.finditer(answer.text, answer.last, limit))
    ends = {tokenizer.eos_token_id, tokenizer.end_of_turn_id}
    first = next((token.end() for token in found if tokenizer.hf.convert_tokens_to_ids(token.group()) in ends), None)
    if first is not None:
        return first
    return found[-1].end() if found and not answer.text[found[-1].end() : limit].strip() else None
