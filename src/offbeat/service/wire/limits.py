"""Limits on the contents of one request, and the checks of tokens that training and sampling share."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.service.errors import BadRequestError


@dataclass(frozen=True, kw_only=True)
class WireLimits:
    """Limits on the contents of one request; the HTTP layer limits its body.

    Attributes:
        vocab_size: upper bound (exclusive) of token IDs.
        context: number of tokens in one sequence or prompt.
        max_datums, max_tokens, max_cells: totals over all datums; cells are entries of their targets, stored or implied.
        max_width: number of targets at one position, K of a tensor [N, K].
        max_datum_cells: number of cells in one datum, which is computed as a whole.
        max_fields: number of protocol-buffer fields; each takes about a microsecond to read.
        max_images: number of images in one sequence or prompt; 0 for a model that reads none.
    """

    vocab_size: int
    context: int
    max_datums: int = 16384
    max_tokens: int = 4 << 20
    max_cells: int = 16 << 20
    max_width: int = 1024
    max_datum_cells: int = 2 << 20
    max_fields: int = 1_000_000
    max_images: int = 0

    def check_length(self, name: str, length: int) -> None:
        """Check the length of a sequence; raises BadRequestError if the sequence has no tokens, or more than the context."""
        if not 0 < length <= self.context:
            raise BadRequestError(f"{name} must have 1 to {self.context} tokens, got {length}")

    def check_ids(self, name: str, ids: Any) -> None:
        """Check token IDs: [N] integers, as a sequence or array. Raises BadRequestError if a number is not a token ID of the model."""
        array = np.asarray(ids)
        if len(array) and not 0 <= array.min() <= array.max() < self.vocab_size:
            wrong = array[(array < 0) | (array >= self.vocab_size)][0]
            raise BadRequestError(f"{name} must hold token ids of 0 to {self.vocab_size - 1}, got {wrong}")
