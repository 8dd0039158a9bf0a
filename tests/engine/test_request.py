"""What a request may ask for."""

import pytest

from offbeat.chat.shaping import Shaping
from offbeat.engine.request import Request, SamplingParams
from offbeat.errors import RefusedError


@pytest.mark.parametrize(("values", "rule"), [
    ({"max_new_tokens": 0}, "max_tokens must be >= 1, got 0"),
    ({"temperature": -0.1}, r"temperature must be 0 \(greedy\) or 0.001 to 1000, got -0.1"),
    ({"temperature": float("nan")}, "temperature must be 0"), ({"temperature": float("inf")}, "got inf"),
    ({"temperature": 1e-38}, "got 1e-38"),
    ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"), ({"top_p": 1.1}, "got 1.1"),
    ({"top_k": -1}, "top_k must be >= 0"), ({"top_k": 2**63 - 1}, "below 2"),
    ({"stop": ("a", "")}, "stop must not hold an empty string"), ({"stop": ("a",) * 65}, "stop takes at most 64 strings, got 65"),
    ({"stop": ("a" * 4000, "b" * 97)}, "stop takes at most 4096 characters in all, got 4097"),
    ({"top_logprobs": -1}, "logprobs must be 0 to 1024 likeliest tokens, got -1"), ({"top_logprobs": 1025}, "got 1025"),
    ({"stop_token_ids": (2**63,)}, "stop_token_ids must be >= 0 and below 2"), ({"stop_token_ids": (1,) * 65}, "at most 64 ids, got 65"),
])
def test_a_value_out_of_range_is_refused_with_its_rule(values: dict, rule: str) -> None:
    with pytest.raises(RefusedError, match=rule):
        SamplingParams(**values)


def test_the_ends_of_the_ranges_are_allowed() -> None:
    SamplingParams(max_new_tokens=1, temperature=0, top_p=1, top_k=0, stop=())
    with pytest.raises(RefusedError, match="n must be >= 1, got 0"):
        Request(id="a", prompt=[1], n=0)


def test_a_sample_goes_on_from_a_part_of_its_prompt_where_nothing_depends_on_what_it_was() -> None:
    assert Request(id="a", prompt=[1, 2, 3], num_begun=2).begun == [2, 3] and Request(id="a", prompt=[1, 2, 3]).begun == []
    for wrong in (-1, 3):
        with pytest.raises(RefusedError, match=r"begun_tokens must be 0 to 2, one less than the prompt's"):
            Request(id="a", prompt=[1, 2, 3], num_begun=wrong)
    with pytest.raises(RefusedError, match="begun_tokens must be 0 with penalties"):
        Request(id="a", prompt=[1, 2, 3], num_begun=1, params=SamplingParams(shaping=Shaping(presence_penalty=1.0)))
