"""Text that a family writes around an image in a prompt, joined with line breaks of the prompt beside it. Called by `data.image_reader`.

A tokenizer has tokens of several line breaks, and transformers' processors write the text before it is encoded. Line breaks on both sides
of an edge are encoded again with it: "user\\n" and "\\n\\n" before an image are "user" and a token of three line breaks.
"""

from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend

EDGE = -2
"""Stands for the text at an edge of an image in tokens that are not finished."""


class Edges:
    """Writes the text of `EDGE` into tokens of a model."""

    def __init__(self, model: str, text: str) -> None:
        """`text` is all line breaks."""
        self._backend = Backend.from_file(str(Path(model) / "tokenizer.json"))
        self._text = text
        self._read = cache(self._text_of)

    def write(self, tokens: np.ndarray, origins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens [L] int32 and their origins [L] int64, with the tokens of the text, of the origins of edges, for each `EDGE`."""
        found, origin, at = [], [], 0
        for edge in np.flatnonzero(tokens == EDGE).tolist():
            if edge < at:
                continue  # written with the one before
            start = edge
            while start > at and set(self._read(int(tokens[start - 1]))) == {"\n"}:
                start -= 1
            stop = edge
            while stop < len(tokens) and set(self._read(int(tokens[stop]))) == {"\n"}:
                stop += 1
            text = "".join(self._read(int(token)) for token in tokens[start:stop])
            ids = self._backend.encode(text, add_special_tokens=False).ids
            found += [tokens[at:start], ids]
            origin += [origins[at:start], np.full(len(ids), origins[edge])]
            at = stop
        return np.concatenate([*found, tokens[at:]]).astype(np.int32), np.concatenate([*origin, origins[at:]]).astype(np.int64)

    def _text_of(self, token: int) -> str:
        if token == EDGE:
            return self._text
        return self._backend.decode([token], skip_special_tokens=False) if token < self._backend.get_vocab_size() else "image"
