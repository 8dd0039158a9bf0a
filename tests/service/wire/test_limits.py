"""Tokens are those of the model, and as many as fit its context."""

import pytest

from offbeat.service.errors import BadRequestError
from offbeat.service.wire.limits import WireLimits

LIMITS = WireLimits(vocab_size=10, context=4)


@pytest.mark.parametrize("length", [0, 5])
def test_a_sequence_has_at_least_one_token_and_fits_the_context(length: int) -> None:
    for fits in (1, 4):
        LIMITS.check_length("prompt", fits)
    with pytest.raises(BadRequestError, match=f"^prompt must have 1 to 4 tokens, got {length}$"):
        LIMITS.check_length("prompt", length)


@pytest.mark.parametrize("wrong", [-1, 10, 2**40])
def test_token_ids_are_of_the_vocabulary(wrong: int) -> None:
    for fits in ([], [0, 9]):
        LIMITS.check_ids("prompt", fits)
    with pytest.raises(BadRequestError, match=f"^prompt must hold token ids of 0 to 9, got {wrong}$"):
        LIMITS.check_ids("prompt", [1, wrong, 2])
