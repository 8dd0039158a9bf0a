"""Text of single tokens, so that a sequence can be shown as text without its tokenizer. Used where rollouts are stored."""

from collections.abc import Sequence

from offbeat.data.image_store import FIRST_ID
from offbeat.data.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # of decoders, for bytes that are no whole character
_LONGEST_RUN = 8


class Pieces:
    """Cuts texts at the bounds of tokens. It remembers the text of each token that it has met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.hf.backend_tokenizer.decode
        self._num_ids = tokenizer.vocab_size
        self._label = tokenizer.image_label
        ids = tokenizer.encode("a")
        # Some decoders drop the space before the first word of a text, so a token is decoded behind an anchor.
        self._anchor = ids[-1:]
        self._known: dict[int, str] = {}

    def split(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, special tokens included; together they are the whole text.

        A character whose bytes lie in several tokens belongs to the last of them. An id that is no token is written as e.g. "<70000>", and
        an image at its first placeholder.
        """
        pieces = [self._known.get(token) or self._piece(token) for token in ids]
        for at in range(len(ids) - 1, 0, -1):
            if ids[at] >= FIRST_ID and ids[at] == ids[at - 1]:
                pieces[at] = ""
        for first, piece in enumerate(pieces):
            if _BROKEN in piece and (first == 0 or _BROKEN not in pieces[first - 1]):
                self._join(ids, pieces, first)
        return pieces

    def _piece(self, token: int) -> str:
        other = self._label(token) if token >= FIRST_ID else f"<{token}>"
        piece = self._added([token]) if 0 <= token < self._num_ids else other
        self._known[token] = piece
        return piece

    def _added(self, ids: Sequence[int]) -> str:
        anchor = self._decode(self._anchor, skip_special_tokens=False)
        text = self._decode([*self._anchor, *ids], skip_special_tokens=False)
        return text[len(anchor):] if text.startswith(anchor) else self._decode(list(ids), skip_special_tokens=False)

    def _join(self, ids: Sequence[int], pieces: list[str], first: int) -> None:
        """Put together, from this token on, characters that lie in several tokens."""
        while first < len(ids) and _BROKEN in pieces[first]:
            for end in range(first + 1, min(first + _LONGEST_RUN, len(ids)) + 1):
                if not 0 <= ids[end - 1] < self._num_ids:
                    break
                text = self._added(ids[first:end])
                if _BROKEN not in text:
                    pieces[first:end] = ["" for _ in range(first, end - 1)] + [text]
                    break
            else:
                end = first + 1  # these bytes are no character at all
            first = max(end, first + 1)
