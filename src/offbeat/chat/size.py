"""Bounds on a chat's bytes and images: one that cannot fit is refused before it is rendered and tokenized. Called by all that serve chats.

Tokenizing takes seconds for a few megabytes, counting bytes microseconds. With 4,096 tokens of at most 32 bytes, for example, more than
131,072 bytes cannot fit.
"""

from functools import lru_cache

import msgspec

from offbeat.chat.messages import ChatRequest
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import RefusedError

_LEAST_BYTES = 1 << 16
"""Bytes that are never refused here: tokenizing them takes a moment, and normalizers may drop white space."""


def check_chat_size(request: ChatRequest, tokenizer: Tokenizer, *, context: int) -> None:
    """Raise RefusedError, with the limit, for a chat of more bytes than `context` tokens can be, or more images than the reader takes."""
    count = sum(len(message.images) for message in request.messages)
    if tokenizer.images is not None and count > tokenizer.images.limits.max_images:
        raise RefusedError(f"the chat has {count} images, allowed are {tokenizer.images.limits.told('max_images')}")
    texts = [text for message in request.messages for text in (
        message.content, message.reasoning, *(call.arguments for call in message.calls))]
    texts += [tool.description for tool in request.tools]
    tools = msgspec.json.encode([tool.parameters for tool in request.tools]) if request.tools else b""
    _check_bytes(sum(map(_num_bytes, texts)) + len(tools), tokenizer, context=context, what="the chat")


def check_text_size(text: str, tokenizer: Tokenizer, *, context: int) -> None:
    """Refuse a prompt of more bytes than `context` tokens can stand for, as `check_chat_size` does."""
    _check_bytes(_num_bytes(text), tokenizer, context=context, what="the prompt")


def _check_bytes(num_bytes: int, tokenizer: Tokenizer, *, context: int, what: str) -> None:
    if num_bytes <= _LEAST_BYTES:
        return
    longest = longest_token_bytes(tokenizer)
    if num_bytes > max(context * longest, _LEAST_BYTES):
        raise RefusedError(
            f"{what} has {num_bytes} bytes, more than {context} tokens of at most {longest} bytes each can hold; shorten it, or begin a new"
            " one")


@lru_cache(maxsize=8)
def longest_token_bytes(tokenizer: Tokenizer) -> int:
    """Return an upper bound on the bytes of text of one token: the length of the longest name in the vocabulary."""
    return max((_num_bytes(name) for name in tokenizer.hf.get_vocab()), default=1)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))
