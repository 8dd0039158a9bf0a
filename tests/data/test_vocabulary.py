"""Tokens that a model's embedding lacks."""

import pytest
from tokenizers import AddedToken

from chats import CHATML, words
from offbeat.config.data import DataConfig
from offbeat.data.row import Row
from offbeat.data.tokenizer import Tokenizer
from offbeat.data.unknown_text import check_row
from offbeat.data.vocabulary import fit_vocabulary
from offbeat.errors import DataError, ModelError


def with_image() -> tuple[Tokenizer, int]:
    """A tokenizer of ChatML with a token of images behind all others, and the number of the others."""
    tokenizer = words(CHATML)
    num_others = len(tokenizer.hf)
    tokenizer.hf.add_tokens([AddedToken("<image>", special=True, normalized=False)])
    return tokenizer, num_others


def test_an_embedding_with_rows_to_spare_is_as_it_should_be() -> None:
    tokenizer, num_others = with_image()
    for num_rows in (None, num_others + 1, num_others + 60):
        assert fit_vocabulary(tokenizer, num_rows, model="m") is tokenizer


def test_an_added_token_that_nothing_writes_may_be_lacking_and_text_with_it_is_refused() -> None:
    tokenizer, num_others = with_image()
    fitted = fit_vocabulary(tokenizer, num_others, model="m")
    assert fitted.encode("hi") == tokenizer.encode("hi") and fitted.unknown_in("hi") == ""
    assert fitted.unknown_in("see <image> there") == "<image>" and tokenizer.unknown_in("see <image> there") == ""
    with pytest.raises(DataError, match="a text has '<image>', which tokenizer 'words' knows, but the model's embedding of"):
        fitted.encode("see <image> there")
    check = check_row(fitted, DataConfig(), answered=True)
    assert check is not None
    check(Row("hi", "a"), "line 3")
    with pytest.raises(DataError, match="line 3: '<image>' in its answer is a token that the tokenizer 'words' knows, but the model's"):
        check(Row("hi", "<image>"), "line 3")


def test_tokens_that_are_needed_may_not_be_lacking() -> None:
    ordinary, ending = words(CHATML), words(None)
    ending.hf.add_tokens([AddedToken("<|end|>", special=True)])  # without resizing the model, which is a frequent mistake
    ending.hf.eos_token = "<|end|>"
    for tokenizer, fewer, named in (
            (ordinary, 40, " and 37 more; give the tokenizer of the model"), (ending, 1, f"'<|end|>' ({len(ending.hf) - 1});")):
        rows = len(tokenizer.hf) - fewer
        with pytest.raises(ModelError) as told:
            fit_vocabulary(tokenizer, rows, model="m")
        assert f"the embedding of m has {rows} rows" in str(told.value) and named in str(told.value)
        assert f"resize_token_embeddings({len(tokenizer.hf)})" in str(told.value)
