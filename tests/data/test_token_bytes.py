"""Bytes of tokens as tokenizers write them; whole tokenizers are in test_tokenizer.py."""

import pytest

from offbeat.data.token_bytes import bytes_of_piece


@pytest.mark.parametrize(("piece", "decoder", "found"), [
    ("Ġa", "ByteLevel", b" a"), ("Ġ一", "ByteLevel", None), ("<0x0A>", "ByteFallback", b"\n"), ("<0x0>", "ByteFallback", None),
    ("▁a", '{"pattern": "▁"}', b" a"), ("a", "", None)])
def test_a_token_is_the_bytes_that_its_decoder_makes_of_it(piece: str, decoder: str, found: bytes | None) -> None:
    assert bytes_of_piece(piece, decoder=decoder) == found
