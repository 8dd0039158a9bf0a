"""Supports at random that have their tokens, in all forms, and the same as masks; for tests of data and trainer."""

import numpy as np

from offbeat.data.sample_supports import BITS, KEPT, LEFT_OUT, WORD_BITS, Supports


def supports_at_random(tokens: np.ndarray, vocab_size: int, *, seed: int = 0, whole_every: int = 4) -> tuple[Supports, np.ndarray]:
    """Return supports of tokens [L], each in the form that its number asks for, and as a mask [L, V] bool; some are whole."""
    generator = np.random.default_rng(seed)
    masks = generator.random((len(tokens), vocab_size)) < generator.choice([0.05, 0.5, 0.95], (len(tokens), 1))
    masks[np.arange(len(tokens)), tokens] = True
    masks[::whole_every] = True
    return as_supports(masks, [LEFT_OUT if number % whole_every == 0 else number % 3 for number in range(len(tokens))]), masks


def as_supports(masks: np.ndarray, forms: list[int]) -> Supports:
    """Return masks [L, V] bool in these forms."""
    return Supports.of_pieces([(form, _words(mask, form)) for mask, form in zip(masks, forms, strict=True)])


def _words(mask: np.ndarray, form: int) -> np.ndarray:
    if form == BITS:
        padded = np.pad(mask, (0, -len(mask) % WORD_BITS))
        return np.packbits(padded, bitorder="little").view("<i4")
    return np.flatnonzero(mask if form == KEPT else ~mask).astype(np.int32)
