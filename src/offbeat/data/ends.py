"""Which tokens and strings end a sample. Called before anything starts; every request then names all of them, for any kind of engine.

A sample ends at the tokenizer's end token, at every end token of the model's generation_config.json, at the special token that the chat
template writes after an assistant's message such as "<|im_end|>", and at `rollout.stop_token_ids` and `rollout.stop`. An end token is part
of the sample and is trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import ConfigError

MAX_ENDS = 64
"""Largest number of end tokens, and of stop strings; engines compare each token with all of them."""


@dataclass(frozen=True)
class Ends:
    """The tokens and strings that end a sample: distinct ids, the tokenizer's end token first, and strings of ordinary text."""

    token_ids: tuple[int, ...]
    strings: tuple[str, ...] = ()


def split_stops(stop: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split `stop` into strings and ids of special tokens, not in decoded text: ["END", "<|im_end|>"] gives ("END",) and the other's id."""
    special = {text: tokenizer.special_tokens.get(text) for text in stop}
    return (
        tuple(text for text, token in special.items() if token is None), tuple(token for token in special.values() if token is not None))


def find_ends(
    tokenizer: Tokenizer, *, model_end_ids: Sequence[int] = (), stop: Sequence[str] = (), stop_token_ids: Sequence[int] = (),
) -> Ends:
    """Collect everything that ends a sample.

    Args:
        model_end_ids: the model's own end tokens, as from `read_end_token_ids`.
        stop: `rollout.stop`. A special token in it is replaced by its id, because decoded text contains no special tokens.

    Raises:
        ConfigError: an id is not a token, a string can never match, or there are too many.
    """
    for token in stop_token_ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise ConfigError(
                f"rollout.stop_token_ids must hold tokens of {tokenizer.name!r}, 0 to {tokenizer.vocab_size - 1}, got {token}")
    strings, special = split_stops(stop, tokenizer)
    for text in strings:
        if inner := tokenizer.special_text_in(text):
            raise ConfigError(
                f"rollout.stop holds {text!r}, which can never match: {inner!r} is a special token of {tokenizer.name!r}, and decoded text"
                f" has none; give {inner!r} by itself")
    turn = () if tokenizer.end_of_turn_id is None else (tokenizer.end_of_turn_id,)
    ids = tuple(dict.fromkeys([tokenizer.eos_token_id, *model_end_ids, *turn, *stop_token_ids, *special]))
    for name, found in (("tokens", ids), ("strings", strings)):
        if len(found) > MAX_ENDS:
            raise ConfigError(
                f"at most {MAX_ENDS} {name} can end a sample, got {len(found)}; give fewer in rollout.stop or rollout.stop_token_ids")
    return Ends(ids, strings)
