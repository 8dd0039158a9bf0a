"""Ends of samples: the tokens and stop strings that end one, besides its limit of tokens.

Used by `rows` for samples that run, and by `completion_endpoints` for one that a request is to go on with.
"""

from collections.abc import Sequence

from offbeat.data.tokenizer import Tokenizer
from offbeat.engine.request import SamplingParams
from offbeat.engine.text import TextStream


def end_ids(params: SamplingParams, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a sample and belong to it: those of the request, then the tokenizer's own unless `ignore_eos` is set."""
    return params.stop_token_ids + (() if params.ignore_eos else (tokenizer.eos_token_id,))


def text_to_stop(params: SamplingParams, tokenizer: Tokenizer, *, begun: Sequence[int] = ()) -> TextStream | None:
    """Return the text in which a sample's stop strings are looked for, with the tokens that it has `begun` with; None without any."""
    if not params.stop:
        return None
    stream = TextStream(tokenizer, params.stop, min_tokens=params.shaping.min_tokens, after=tokenizer.anchor)
    stream.begin(begun)
    return stream


def has_ended(params: SamplingParams, tokenizer: Tokenizer, begun: Sequence[int]) -> bool:
    """Whether a sample with these tokens, at least one, has ended already, such as [4, 2] where 2 is the end token."""
    text = text_to_stop(params, tokenizer, begun=begun)
    return begun[-1] in end_ids(params, tokenizer) or (text is not None and text.stopped)
