"""A sample is whole, or an error of the engine that gave it."""

from dataclasses import replace

import pytest

from offbeat.errors import EngineError
from offbeat.inference.sampling import Sample

WHOLE = Sample((4, 5, 0), (-0.1, -0.2, -0.3), (2, 2, 3), "ab", "stop")


def test_a_whole_sample_is_itself() -> None:
    assert WHOLE.check() is WHOLE and WHOLE.num_retries == 0


@pytest.mark.parametrize(("sample", "reason"), [
    (replace(WHOLE, versions=(2, 2)), "3 tokens with 3 log-probabilities and 2 versions"),
    (replace(WHOLE, logprobs=()), "3 tokens with 0 log-probabilities and 3 versions"),
    (replace(WHOLE, finish_reason="abort"), "ended a sample with 'abort'"),
])
def test_a_sample_that_cannot_be_trained_on_is_an_error(sample: Sample, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        sample.check()
