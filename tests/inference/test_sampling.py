"""A sample is whole, or an error of the engine that gave it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from offbeat.errors import EngineError
from offbeat.inference.sampling import PromptScore, Sample, Sampling, ScoreRequest

WHOLE = Sample((4, 5, 0), (-0.1, -0.2, -0.3), (2, 2, 3), "ab", "stop")


def test_a_whole_sample_is_itself() -> None:
    assert WHOLE.check() is WHOLE and WHOLE.num_retries == 0


def test_a_samples_arrays_cannot_be_written_and_are_told_as_tuples_too() -> None:
    logprobs = np.array([-0.5, -0.25, 0])
    sample = Sample((4, 5, 0), logprobs, np.array([2, 2, 3]), "ab", "stop")
    assert [array.dtype for array in (sample.tokens, sample.token_logprobs, sample.token_versions)] == [np.int32, np.float32, np.int32]
    assert (sample.token_ids, sample.logprobs, sample.versions) == ((4, 5, 0), (-0.5, -0.25, 0.0), (2, 2, 3))
    with pytest.raises(ValueError, match="read-only"):
        sample.tokens[0] = 1
    own = np.zeros(1, np.int32)
    Sample(own, own, own, "", "stop")
    own[0] = 1  # that of the caller stays as it was


@pytest.mark.parametrize(("sample", "reason"), [
    (replace(WHOLE, token_versions=(2, 2)), "3 tokens with 3 log-probabilities and 2 versions"),
    (replace(WHOLE, token_logprobs=()), "3 tokens with 0 log-probabilities and 3 versions"),
    (replace(WHOLE, finish_reason="abort"), "ended a sample with 'abort'"),
    (replace(WHOLE, top_logprobs=(((4, -0.1),),)), "3 tokens with the likeliest at 1 positions"),
])
def test_a_sample_that_cannot_be_trained_on_is_an_error(sample: Sample, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        sample.check()


def test_only_limits_that_leave_tokens_out_restrict() -> None:
    assert not any(sampling.is_restricted for sampling in (Sampling(1), Sampling(1, 0.5), Sampling(1, 0.0, top_k=3, top_p=0.5)))
    assert Sampling(1, top_k=3).is_restricted and Sampling(1, top_p=0.5).is_restricted


REQUEST = ScoreRequest((4, 5), 1, ((), (7,)))
SCORE = PromptScore((math.nan, -0.5), 3, ((), ((5, -0.5),)), ((), (-2.0,)))


def test_a_score_that_answers_its_request_is_itself() -> None:
    assert SCORE.check(REQUEST) is SCORE
    PromptScore((math.nan, -0.5), 3).check(ScoreRequest((4, 5)))


@pytest.mark.parametrize("score", [
    replace(SCORE, logprobs=(math.nan,)), replace(SCORE, logprobs=(math.nan, math.nan)), replace(SCORE, top=((),)),
    replace(SCORE, target_logprobs=((),) * 3)])
def test_a_score_in_part_is_an_error(score: PromptScore) -> None:
    with pytest.raises(EngineError, match="an engine scored . of 2 tokens"):
        score.check(REQUEST)
