"""Text of growing token sequences, and stop strings in it. Used by the engine to end samples and by the server to answer."""

from typing import Protocol


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: list[int]) -> str: ...


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """Text before the first stop string in it."""
    found = [at for at in map(text.find, stops) if at >= 0]
    return text[: min(found)] if found else text


class TextStream:
    """Text of one sample, token by token, held back where a character or a stop string may be incomplete.

    The pieces that `push` and `finish` return add up to `cut_at_stop(decode(ids), stops)`.
    """

    def __init__(self, tokenizer: Decoder, stops: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = stops
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
        before = self._tokenizer.decode(self._ids[self._context : self._read])
        text = self._tokenizer.decode(self._ids[self._context :])
        if text.endswith("\ufffd") and not final:  # a character whose bytes are not complete
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _release(self, new: str, *, final: bool) -> str:
        text = self._held + new
        cut = cut_at_stop(text, self._stops)
        self.stopped = len(cut) < len(text)
        keep = 0 if self.stopped or final else max((_overlap(text, stop) for stop in self._stops), default=0)
        certain = cut[: len(cut) - keep]
        self._held = text[len(certain) :]
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
