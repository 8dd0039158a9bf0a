"""Whether a model has every token of a tokenizer. Called where the two are read, before anything starts.

An embedding with more rows than the tokenizer has tokens is common, and padding. One with fewer is a mistake, unless the missing tokens are
added ones that nothing writes by itself, such as Gemma 3's token of images in its model of text alone: text that spells one out is then
refused where it is encoded.
"""

from dataclasses import replace

from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import ModelError

_CHAT = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]
_MOST_NAMED = 3


def fit_vocabulary(tokenizer: Tokenizer, num_rows: int | None, *, model: str) -> Tokenizer:
    """Return a tokenizer that encodes nothing as a token that the model lacks.

    The model's embedding has `num_rows`, None if that is not known; messages name it `model`. Raises ModelError if tokens that it lacks are
    ordinary ones, or ones that end texts or that the chat template writes.
    """
    lacking = {index: token for token, index in tokenizer.hf.get_vocab().items() if num_rows is not None and index >= num_rows}
    if not lacking or num_rows is None:
        return tokenizer
    named = ", ".join(f"{lacking[index]!r} ({index})" for index in sorted(lacking)[:_MOST_NAMED])
    more = f" and {len(lacking) - _MOST_NAMED} more" if len(lacking) > _MOST_NAMED else ""
    added = tokenizer.hf.added_tokens_decoder
    if any(index not in added for index in lacking) or lacking.keys() & _needed(tokenizer):
        raise ModelError(
            f"the tokenizer {tokenizer.name!r} has tokens up to {max(lacking)}, but the embedding of {model} has {num_rows} rows, so the"
            f" model lacks {named}{more}; give the tokenizer of the model (model.tokenizer), or resize the model's embedding with"
            f" resize_token_embeddings({max(lacking) + 1}) and save it again")
    return replace(tokenizer, num_rows=num_rows)


def _needed(tokenizer: Tokenizer) -> set[int]:
    """Return the tokens at the ends and beginnings of texts, and the chat template's."""
    needed = {tokenizer.eos_token_id, tokenizer.pad_token_id, *tokenizer.bos_ids, tokenizer.end_of_turn_id, tokenizer.unknown_id}
    if tokenizer.has_chat_template:
        for messages, to_answer in ((_CHAT, False), (_CHAT[:1], True)):
            try:
                needed |= set(tokenizer.encode(tokenizer.chat_text(messages, to_answer=to_answer)))
            except ModelError:  # it refuses this chat; the rows of the data show its end tokens
                continue
    return {token for token in needed if token is not None}
