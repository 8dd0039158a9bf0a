"""What a request may ask for."""

import pytest

from offbeat.errors import RefusedError
from offbeat.inference.embedded.request import Request, SamplingParams


@pytest.mark.parametrize(("values", "rule"), [
    ({"max_new_tokens": 0}, "max_tokens must be >= 1, got 0"), ({"temperature": -0.1}, "temperature must be >= 0 and finite"),
    ({"temperature": float("nan")}, "temperature must be >= 0 and finite"), ({"temperature": float("inf")}, "got inf"),
    ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"), ({"top_p": 1.1}, "got 1.1"), ({"top_k": -1}, "top_k must be >= 0"),
    ({"stop": ("a", "")}, "stop must not hold an empty string"),
])
def test_a_value_out_of_range_is_refused_with_its_rule(values: dict, rule: str) -> None:
    with pytest.raises(RefusedError, match=rule):
        SamplingParams(**values)


def test_the_ends_of_the_ranges_are_allowed() -> None:
    SamplingParams(max_new_tokens=1, temperature=0, top_p=1, top_k=0, stop=())
    with pytest.raises(RefusedError, match="n must be >= 1, got 0"):
        Request(id="a", prompt=[1], n=0)
