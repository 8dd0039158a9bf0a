"""Bytes of tokens as tokenizers write them: GPT-2's letters for bytes, byte tokens, and sentencepiece's sign for a space. Pure."""

import re

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {
    **{chr(byte): byte for byte in _PRINTED},
    **{chr(0x100 + at): byte for at, byte in enumerate(byte for byte in range(0x100) if byte not in _PRINTED)}}
"""The byte for each character in the tokens of a tokenizer over bytes: GPT-2 writes bytes that are no printed character from U+0100 on."""


def bytes_of_piece(piece: str, *, decoder: str) -> bytes | None:
    """Return the bytes of a token, such as b"\\n" for "<0x0A>" with a decoder that falls back to bytes.

    `piece` is the token as the vocabulary writes it, and `decoder` the description of the tokenizer's decoder as JSON. None where that
    says nothing of this token by itself.
    """
    if "ByteLevel" in decoder and all(char in _BYTES for char in piece):
        return bytes(_BYTES[char] for char in piece)
    if "ByteFallback" in decoder and (byte := _BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(byte.group(1), 16)])
    return piece.replace("\u2581", " ").encode(errors="replace") if "\u2581" in decoder else None
