"""What one request may hold, and the checks of tokens that training and sampling share."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.service.errors import BadRequestError


@dataclass(frozen=True, kw_only=True)
class WireLimits:
    """Bounds of what one request may hold; that of its body is the HTTP layer's.

    Attributes:
        vocab_size: token ids are below it.
        context: tokens of one sequence or prompt.
        max_datums, max_tokens, max_cells: of all datums together; cells are those of their targets, listed or not.
        max_width: targets at one position, which is the K of a tensor [N, K].
        max_datum_cells: of one datum, which is computed as a whole.
        max_fields: of protocol buffers; each takes about a microsecond to read.
    """

    vocab_size: int
    context: int
    max_datums: int = 16384
    max_tokens: int = 4 << 20
    max_cells: int = 16 << 20
    max_width: int = 1024
    max_datum_cells: int = 2 << 20
    max_fields: int = 1_000_000

    def check_length(self, name: str, length: int) -> None:
        """
        Raises:
            BadRequestError: a sequence has no tokens, or more than the context.
        """
        if not 0 < length <= self.context:
            raise BadRequestError(f"{name} must have 1 to {self.context} tokens, got {length}")

    def check_ids(self, name: str, ids: Any) -> None:
        """
        Raises:
            BadRequestError: a number is no token of the model's.
        """
        array = np.asarray(ids)
        if len(array) and not 0 <= array.min() <= array.max() < self.vocab_size:
            wrong = array[(array < 0) | (array >= self.vocab_size)][0]
            raise BadRequestError(f"{name} must hold token ids of 0 to {self.vocab_size - 1}, got {wrong}")
