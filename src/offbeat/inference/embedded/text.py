"""Text of growing token sequences, and stop strings in it. Used by the engine to end samples and by the server to answer.

What a token costs does not depend on how many stop strings there are, how long they are, or what the text so far is.
"""

from functools import lru_cache
from typing import Protocol

_UNREADABLE = "\ufffd"
_LONGEST_CHARACTER = 4
_MOST_HELD = 16
"""Tokens whose last character is incomplete, before the rest of their text is released; no tokenizer takes that many for a character."""


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: list[int]) -> str: ...


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """Text before the first stop string in it."""
    found = [at for at in map(text.find, stops) if at >= 0]
    return text[: min(found)] if found else text


class StopStrings:
    """An automaton that finds any of some strings in a text in one pass (Aho and Corasick, 1975).

    A state is the longest end of the text that begins one of the strings; 0 is none.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
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
        """To each state the longest shorter one with the same end, breadth first, so that those are linked already."""
        level = list(self._next[0].values())
        while level:
            for state in level:
                for char, longer in self._next[state].items():
                    self._shorter[longer] = self.step(self._shorter[state], char)
                    self._found[longer] = self._found[longer] or self._found[self._shorter[longer]]
            level = [longer for state in level for longer in self._next[state].values()]

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (longer := self._next[state].get(char)) is None:
            if state == 0:
                return 0
            state = self._shorter[state]
        return longer

    def begun(self, state: int) -> int:
        """Length of the end of the text that begins one of the strings."""
        return self._depth[state]

    def found(self, state: int) -> int:
        """Length of the longest of the strings that the text ends with; 0 if it ends with none."""
        return self._found[state]


stop_strings = lru_cache(maxsize=16)(StopStrings)
"""The automaton of these strings, which samples of a request share."""


class TextStream:
    """Text of one sample, token by token, held back where a character or a stop string may be incomplete.

    The pieces that `push` and `finish` return add up to `cut_at_stop(decode(ids), stops)`.
    """

    def __init__(self, tokenizer: Decoder, stops: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = stop_strings(stops)
        self._state = 0
        self._ids: list[int] = []
        self._context = 0
        self._read = 0
        self._held = ""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now certain."""
        self._ids.append(token_id)
        return "" if self.stopped else self._release(self._decode_new(final=False), final=False)

    def finish(self) -> str:
        """The rest of the text."""
        return "" if self.stopped else self._release(self._decode_new(final=True), final=True)

    def _decode_new(self, *, final: bool) -> str:
        # Decoded together with the tokens of the last piece: many tokenizers place a space by what stands before.
        before = _complete(self._tokenizer.decode(self._ids[self._context : self._read]))
        text = self._tokenizer.decode(self._ids[self._context :])
        if text.endswith(_UNREADABLE) and not final:  # a character whose bytes are not complete, or never will be
            if len(self._ids) - self._read < _MOST_HELD:
                return ""
            text = _complete(text)
        self._context, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _release(self, new: str, *, final: bool) -> str:
        text, cut = self._held + new, -1
        for end, char in enumerate(new, start=len(self._held) + 1):
            self._state = self._stops.step(self._state, char)
            if length := self._stops.found(self._state):
                cut = end - length if cut < 0 else min(cut, end - length)
        self.stopped = cut >= 0
        begun = 0 if final else self._stops.begun(self._state)
        certain = cut if self.stopped else len(text) - begun
        self._held = text[certain:]
        return text[:certain]


def _complete(text: str) -> str:
    """Text without a last character that may lack bytes."""
    size = len(text)
    while size and len(text) - size < _LONGEST_CHARACTER - 1 and text[size - 1] == _UNREADABLE:
        size -= 1
    return text[:size]
