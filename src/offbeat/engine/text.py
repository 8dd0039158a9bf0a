"""Text of growing token sequences, and stop strings in it. Used by the engine to end samples and by the server to answer.

The cost of a token does not depend on the number or length of stop strings, or on the text so far.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

_UNREADABLE = "\ufffd"
_LONGEST_CHARACTER = 4
_MOST_HELD = 16
"""Tokens held back for an incomplete character before their text is released anyway; no tokenizer needs that many for a character."""
_NEWEST = 2 * _MOST_HELD
"""Tokens at the end of those that are given at once whose text may still depend on the next one."""


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: list[int]) -> str: ...


def cut_at_stop(text: str, stops: tuple[str, ...], *, keep_stop: bool = False) -> str:
    """Return the text before the first stop string in it, or with it: "ab" or "ab#" of "ab#c" for the stop string "#"."""
    found = [at + keep_stop * len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


class StopStrings:
    """An automaton that finds any of several strings in a text in one pass (Aho and Corasick, 1975).

    A state is the longest suffix of the text that is a prefix of one of the strings; state 0 is the empty suffix.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self._longest = max(map(len, stops), default=0)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found = [0]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._found.append(0)
                state = self._next[state][char]
            self._found[state] = len(stop)
        self._shorter = [0] * len(self._next)
        self._link()

    def _link(self) -> None:
        """Link each state to its longest proper suffix that is a state, breadth first, so that shorter states are linked already."""
        level = list(self._next[0].values())
        while level:
            for state in level:
                for char, longer in self._next[state].items():
                    self._shorter[longer] = self.step(self._shorter[state], char)
                    self._found[longer] = self._found[longer] or self._found[self._shorter[longer]]
            level = [longer for state in level for longer in self._next[state].values()]

    def step(self, state: int, char: str) -> int:
        while (longer := self._next[state].get(char)) is None:
            if state == 0:
                return 0
            state = self._shorter[state]
        return longer

    def after(self, text: str) -> int:
        """Return the state after a text, which only the end of it decides that is as long as the longest string."""
        state = 0
        for char in text[max(len(text) - self._longest, 0) :]:
            state = self.step(state, char)
        return state

    def begun(self, state: int) -> int:
        """Length of the text's suffix that is a prefix of one of the strings."""
        return self._depth[state]

    def found(self, state: int) -> int:
        """Length of the longest of the strings that the text ends with; 0 if it ends with none."""
        return self._found[state]


stop_strings = lru_cache(maxsize=16)(StopStrings)
"""The automaton of these strings, shared by the samples of a request."""


class TextStream:
    """Text of one sample, token by token, held back where a character or a stop string may be incomplete.

    The pieces that `push` and `finish` return concatenate to the decoded text, up to the first stop string that ends after `min_tokens`
    tokens, with it if `keep_stop` is set.
    """

    def __init__(
        self, tokenizer: Decoder, stops: tuple[str, ...] = (), *, min_tokens: int = 0, keep_stop: bool = False, after: Sequence[int] = (),
    ) -> None:
        """`after` are the tokens of the preceding text (see `Tokenizer.anchor`), which is in no piece."""
        self.stopped = False
        self._min_tokens = min_tokens
        self._keep_stop = keep_stop
        self._tokenizer = tokenizer
        self._stops = stop_strings(stops)
        self._state = 0
        self._num_tokens = 0
        self._ids: list[int] = list(after)
        self._context = 0
        self._read = len(self._ids)
        self._held = ""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that can no longer change."""
        self._ids.append(token_id)
        self._num_tokens += 1
        return "" if self.stopped else self._release(self._decode_new(final=False), final=False)

    def begin(self, ids: Sequence[int]) -> None:
        """Add the first tokens at once, whose text is not wanted; afterwards all is as if they had been pushed one by one.

        The text of all but the last few is decoded and searched for stop strings once, as a whole: thousands of tokens take a millisecond.
        """
        assert not self._num_tokens, "a text begins once"
        head = [] if self._min_tokens else list(ids[: max(len(ids) - _NEWEST, 0)])
        if head:
            before = _complete(self._tokenizer.decode(self._ids))
            text = _complete(self._tokenizer.decode([*self._ids, *head]))[len(before) :]
            self.stopped = any(stop in text for stop in self._stops.stops)
            self._state = self._stops.after(text)
            self._held = text[len(text) - self._stops.begun(self._state) :]
            self._num_tokens = len(head)
            self._ids = [*self._ids, *head][-_NEWEST:]
            self._context, self._read = 0, len(self._ids)
        for token in ids[len(head) :]:
            self.push(token)

    def finish(self) -> str:
        """Return the rest of the text."""
        return "" if self.stopped else self._release(self._decode_new(final=True), final=True)

    def _decode_new(self, *, final: bool) -> str:
        # Decode together with the tokens of the last piece, since many tokenizers place a space depending on the preceding token.
        before = _complete(self._tokenizer.decode(self._ids[self._context : self._read]))
        text = self._tokenizer.decode(self._ids[self._context :])
        if text.endswith(_UNREADABLE) and not final:  # a character whose bytes are not complete yet, or never will be
            if len(self._ids) - self._read < _MOST_HELD:
                return ""
            text = _complete(text)
        if len(text) == len(before):  # special tokens alone: the next piece is still decoded after the last one with text
            del self._ids[self._read :]
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _release(self, new: str, *, final: bool) -> str:
        text, cut = self._held + new, -1
        for end, char in enumerate(new, start=len(self._held) + 1):
            self._state = self._stops.step(self._state, char)
            length = self._stops.found(self._state)
            if length and self._num_tokens > self._min_tokens:
                at = end if self._keep_stop else end - length
                cut = at if cut < 0 else min(cut, at)
        self.stopped = cut >= 0
        begun = 0 if final else self._stops.begun(self._state)
        certain = cut if self.stopped else len(text) - begun
        self._held = text[certain:]
        return text[:certain]


def _complete(text: str) -> str:
    """Return the text without a last character that may lack bytes."""
    size = len(text)
    while size and len(text) - size < _LONGEST_CHARACTER - 1 and text[size - 1] == _UNREADABLE:
        size -= 1
    return text[:size]
