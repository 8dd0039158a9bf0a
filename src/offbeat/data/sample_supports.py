"""Supports: the tokens among which each sampled token was drawn, where top-p, top-k, min-p or a structure left others out. Numpy only.

An engine returns them with its samples, trajectories and batches carry them, and the trainer normalises over them
(`model.support_replay`). The support of a token is written in the form that takes the fewest words of 4 bytes, for example with a
vocabulary of 64 tokens:

    whole vocabulary    LEFT_OUT  []
    all but 7           LEFT_OUT  [7]
    3, 8 or 41          KEPT      [3, 8, 41]        a top-p that leaves few
    the even ones       BITS      2 words, a bit for each token, the lowest one for token 0

So no token takes more than an eighth of a byte for each token of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import zstandard

from offbeat.data.ranges import bounds, gather_ranges
from offbeat.errors import DataError

LEFT_OUT, KEPT, BITS = 0, 1, 2

WORD_BITS = 32


@dataclass(frozen=True, eq=False)
class Supports:
    """The supports of L tokens.

    Attributes:
        forms: [L] uint8: LEFT_OUT lists the tokens that are not in it, KEPT those that are, BITS has bits.
        sizes: [L] int32, number of words of each.
        words: [sum of sizes] int32, back to back: token ids, ascending, or bits.
    """

    forms: np.ndarray
    sizes: np.ndarray
    words: np.ndarray

    @classmethod
    def whole_vocabulary(cls, length: int) -> "Supports":
        """Return the whole vocabulary, `length` times."""
        return cls(np.zeros(length, np.uint8), np.zeros(length, np.int32), np.zeros(0, np.int32))

    @classmethod
    def of_pieces(cls, pieces: Sequence[tuple[int, np.ndarray]]) -> "Supports":
        """Return the supports of which `pieces` gives the forms and words."""
        return cls(
            np.array([form for form, _ in pieces], np.uint8), np.array([len(words) for _, words in pieces], np.int32),
            np.concatenate([np.zeros(0, np.int32), *(words for _, words in pieces)], dtype=np.int32))

    def __len__(self) -> int:
        return len(self.forms)

    @property
    def forms_and_words(self) -> Iterator[tuple[int, np.ndarray]]:
        """The form and the words of each."""
        return zip(self.forms.tolist(), np.split(self.words, np.cumsum(self.sizes)[:-1]), strict=True) if len(self) else iter(())

    @property
    def are_whole(self) -> np.ndarray:
        """[L] bool, whether each is the whole vocabulary."""
        return (self.forms == LEFT_OUT) & (self.sizes == 0)

    def at_indices(self, which: np.ndarray) -> "Supports":
        """Return the supports at indices [K]."""
        return Supports(self.forms[which], self.sizes[which], self.words[gather_ranges(bounds(self.sizes), which)])

    def hold(self, tokens: np.ndarray) -> np.ndarray:
        """Return [L] bool, whether each has its token [L]."""
        owner = np.repeat(np.arange(len(self)), self.sizes)
        listed = np.zeros(len(self), np.bool_)
        listed[owner[self.words == tokens[owner]]] = True
        found = np.where(self.forms == KEPT, listed, ~listed)
        at = np.flatnonzero(self.forms == BITS)
        place = tokens[at].astype(np.int64) // WORD_BITS
        inside = (place >= 0) & (place < self.sizes[at])
        found[at] = False
        at, place = at[inside], place[inside]
        found[at] = self.words[bounds(self.sizes)[at] + place] >> (tokens[at] % WORD_BITS) & 1
        return found


def join_supports(parts: Sequence[Supports | None], lengths: Sequence[int]) -> Supports | None:
    """Return the supports of sequences back to back, of which None is whole; None where none of them leaves anything out."""
    if all(part is None or (not part.words.size and part.are_whole.all()) for part in parts):
        return None
    known = [Supports.whole_vocabulary(length) if part is None else part for part, length in zip(parts, lengths, strict=True)]
    return Supports(*(np.concatenate([getattr(part, name) for part in known]) for name in ("forms", "sizes", "words")))


def check_supports(supports: object, tokens: np.ndarray) -> Supports:
    """Return the supports of tokens [L]; raises DataError, with the end of a sentence, if they are none or one lacks its token."""
    if not isinstance(supports, Supports):
        raise DataError(f"must be Supports, got {type(supports).__name__}")
    if len(supports) != len(tokens):
        raise DataError(f"must have {len(tokens)} entries like tokens, got {len(supports)}")
    if (lost := np.flatnonzero(~supports.hold(tokens))).size:
        raise DataError(f"must have each token among those that it was drawn from, and token {int(tokens[lost[0]])} is not")
    return supports


class _PackedSupports(msgspec.Struct, array_like=True):
    forms: bytes
    sizes: bytes
    words: bytes


def pack_supports(supports: Supports) -> bytes:
    """Return supports as bytes, compressed: ids as differences from the one before, and bytes of equal significance together."""
    words = supports.words.copy()
    words[1:] -= supports.words[:-1]
    plain = np.repeat(supports.forms == BITS, supports.sizes)
    plain[bounds(supports.sizes)[:-1][supports.sizes > 0]] = True
    words[plain] = supports.words[plain]
    packed = _PackedSupports(supports.forms.tobytes(), _by_significance(supports.sizes), _by_significance(words))
    return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(packed))


def unpack_supports(packed: bytes) -> Supports:
    """Return the supports of bytes from `pack_supports`; raises DataError if the bytes are none."""
    try:
        told = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(packed), type=_PackedSupports)
        forms, sizes, words = np.frombuffer(told.forms, np.uint8), _from_significance(told.sizes), _from_significance(told.words)
    except (zstandard.ZstdError, msgspec.DecodeError, ValueError) as exc:
        raise DataError(f"these bytes are not supports: {exc}") from exc
    if len(sizes) != len(forms) or (sizes < 0).any() or sizes.sum() != len(words) or (forms > BITS).any():
        raise DataError("these bytes are not supports: their parts do not fit each other")
    # Differences add up within a support: those before its first word are taken off again.
    listed = np.repeat(forms != BITS, sizes)
    summed = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.where(listed, words, 0), dtype=np.int64)])
    before = np.repeat(summed[bounds(sizes)[:-1]], sizes)
    return Supports(forms, sizes, np.where(listed, summed[1:] - before, words).astype(np.int32))


def _by_significance(values: np.ndarray) -> bytes:
    """Return the bytes of int32 values [N], the lowest of all first, then the second, and so on."""
    return np.ascontiguousarray(values.astype("<i4").view(np.uint8).reshape(-1, 4).T).tobytes()


def _from_significance(data: bytes) -> np.ndarray:
    """Return the [N] int32 values of `_by_significance`."""
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(4, -1).T).view("<i4").reshape(-1).astype(np.int32, copy=False)
