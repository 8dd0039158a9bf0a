"""Answers of completions become samples, whatever form their arrays have."""

from typing import Any

import msgspec
import numpy as np
import pytest

from offbeat.errors import EngineError
from offbeat.inference.dialects.completions import read_samples, top_tokens

TOKENS, LOGPROBS, VERSIONS = [4, 5, 150_000], [-0.125, -2.5, 0.0], [2, 2, 3]
LISTS = {
    "token_ids": TOKENS, "logprobs": {"token_logprobs": LOGPROBS}, "versions": VERSIONS, "text": "ab", "finish_reason": "stop"}
ARRAYS = LISTS | {
    "token_ids": np.array(TOKENS, "<i4").tobytes(), "versions": np.array(VERSIONS, "<i4").tobytes(),
    "logprobs": {"token_logprobs": np.array(LOGPROBS, "<f4").tobytes()}}


def read(*choices: Any, adapter: str = "", num_top: int = 0, unversioned: int | None = None):
    return read_samples(msgspec.json.encode({"choices": choices, "usage": {}}), adapter=adapter, num_top=num_top, unversioned=unversioned)


def test_lists_and_arrays_are_the_same_samples() -> None:
    for sample in read(LISTS, ARRAYS):
        assert (sample.token_ids, sample.logprobs, sample.versions) == (tuple(TOKENS), tuple(LOGPROBS), tuple(VERSIONS))
        assert (sample.text, sample.finish_reason, sample.top_logprobs) == ("ab", "stop", ())
    (nothing,) = read(ARRAYS | {"token_ids": b"", "versions": b"", "logprobs": {"token_logprobs": b""}})
    assert nothing.token_ids == nothing.logprobs == nothing.versions == ()


def test_an_adapter_has_the_version_of_its_name_and_weights_that_are_told_no_version_the_first_one() -> None:
    assert [sample.versions for sample in read(LISTS, ARRAYS, adapter="alice@12")] == [(12,) * 3] * 2
    untold = {name: value for name, value in LISTS.items() if name != "versions"}
    assert read(untold, unversioned=-1)[0].versions == (-1,) * 3 and read(LISTS, unversioned=-1)[0].versions == (2, 2, 3)
    with pytest.raises(KeyError, match="versions"):
        read(untold)


def test_what_is_not_read_may_be_anything_and_the_likeliest_tokens_are_read_when_they_are_asked_for() -> None:
    rows = [{"token_id:9": -3.0, "token_id:4": -0.5}, {"token_id:5": 0.0, "token_id:6": -9999.0}, {}]
    told = LISTS | {"logprobs": {"token_logprobs": LOGPROBS, "tokens": [None, 3], "text_offset": "?", "top_logprobs": rows}, "index": "x"}
    assert read(told, num_top=1)[0].top_logprobs == (((4, -0.5),), ((5, 0.0),), ())
    assert read(told | {"logprobs": {"token_logprobs": LOGPROBS, "top_logprobs": "?"}})[0].top_logprobs == ()
    assert top_tokens({3: -1.0, 4: -0.5, 5: -9999.0}, 3) == ((4, -0.5), (3, -1.0))


def test_a_log_probability_that_is_missing_is_not_a_number() -> None:
    (sample,) = read(LISTS | {"logprobs": {"token_logprobs": [None, -2.5, 0.0]}})
    assert np.isnan(sample.logprobs[0]) and sample.logprobs[1:] == (-2.5, 0.0)


@pytest.mark.parametrize(("changes", "error"), [
    ({"versions": [2, 2]}, EngineError), ({"finish_reason": None}, EngineError), ({"finish_reason": "abort"}, EngineError),
    ({"token_ids": ["a", "b", "c"]}, msgspec.ValidationError), ({"token_ids": [1, 2, 2**31]}, OverflowError),
    ({"token_ids": b"12345"}, ValueError), ({"logprobs": None}, msgspec.ValidationError)])
def test_what_cannot_be_a_sample_is_an_error(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        read(LISTS | changes)
    for data in (b"{}", b"[]", b'{"choices": 3}', b"no"):
        with pytest.raises(msgspec.DecodeError):
            read_samples(data, adapter="", num_top=0)
