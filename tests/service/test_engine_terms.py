"""Between the service's terms and those of engines: what ends a sample, and how samples and scores are laid out."""

import math
from dataclasses import replace

import numpy as np
import pytest

from offbeat.inference.sampling import Draws, PromptScore, Sample
from offbeat.inference.sampling import Sampling as EngineSampling
from offbeat.service.engine_terms import draws_of, engine_sampling, sampled, sequence_of
from offbeat.service.types import SampleRequest, SparseArray
from offbeat.types import Version
from sampler_world import SESSION

NAN = math.nan
REQUEST = SampleRequest(f"{SESSION}:sample:0", 0, prompt=(5, 6, 7), max_tokens=4)


@pytest.mark.parametrize(("stop", "expected"), [
    (None, ((), (2, 9), False)), ((), ((), (), True)), (("a", "b"), (("a", "b"), (2, 9), False)), ((7, 9), ((), (2, 9, 7), False)),
    (("a", 7), (("a",), (2, 9, 7), False))])
def test_stop_rules_reach_engines_as_they_are_meant(stop: tuple | None, expected: tuple) -> None:
    request = replace(REQUEST, stop=stop, seed=3, temperature=0.5, top_k=4, top_p=0.9, topk_sample_logprobs=2)
    sampling = engine_sampling(request, 9, end_token_ids=(2, 9))
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == expected
    assert sampling == replace(
        EngineSampling(9, temperature=0.5, top_p=0.9, top_k=4, seed=3, scaled_logprobs=True, top_logprobs=2), stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids, ignore_eos=sampling.ignore_eos)


SCORE = PromptScore(
    (NAN, -1.0, -2.0), Version(0), top=((), ((6, -1.0), (9, -1.5)), ((7, -2.0),)), target_logprobs=((), (-3.0,), (-4.0, -5.0)))


def test_scores_of_a_prompt_are_laid_out_as_they_were_asked_for() -> None:
    targets = SparseArray(np.array([8, 3, 4]), np.array([2, 4, 5]), (3, 2))
    request = replace(
        REQUEST, prompt_logprobs=True, topk_prompt_logprobs=2, target_prompt_logprobs=targets, topk_sample_logprobs=3)
    top = (((5, -0.1), (6, -0.2), (7, -0.3)), ((5, -0.1),))
    answer = sampled(request, [sequence_of(Sample((5, 6), (-0.1, -0.2), (0, 0), "", "stop", top_logprobs=top), 3)], SCORE)
    assert answer.prompt_logprobs is not None and answer.topk_prompt is not None
    np.testing.assert_array_equal(answer.prompt_logprobs, np.array([NAN, -1, -2], np.float32))
    np.testing.assert_array_equal(answer.topk_prompt.ids, [[-1, -1], [6, 9], [7, -1]])
    np.testing.assert_array_equal(answer.topk_prompt.logprobs, [[0, 0], [-1, -1.5], [-2, 0]])
    assert answer.target_prompt_logprobs is not None
    np.testing.assert_array_equal(answer.target_prompt_logprobs.dense(), [[0, 0], [-3, 0], [-4, -5]])
    (sequence,) = answer.sequences
    assert sequence.stop_reason == "stop" and sequence.top is not None and sequence.tokens.dtype == np.int32
    np.testing.assert_array_equal(sequence.top.ids, [[5, 6, 7], [5, -1, -1]])


def test_only_the_last_positions_of_a_prompt_are_scored_if_that_is_asked() -> None:
    answer = sampled(replace(REQUEST, prompt_logprobs=True, topk_prompt_logprobs=1, prompt_logprobs_last_n=1), [], SCORE)
    assert answer.prompt_logprobs is not None and answer.topk_prompt is not None
    np.testing.assert_array_equal(answer.prompt_logprobs, np.array([NAN, NAN, -2], np.float32))
    np.testing.assert_array_equal(answer.topk_prompt.ids, [[-1], [-1], [7]])


def test_the_tokens_of_an_image_have_no_log_probabilities() -> None:
    request = replace(REQUEST, prompt=(5, 2**30, 2**30, 7), prompt_logprobs=True)
    answer = sampled(request, [], PromptScore((NAN, -9.0, -9.0, -2.0), Version(0)))
    assert answer.prompt_logprobs is not None and np.isnan(answer.prompt_logprobs).tolist() == [True, True, True, False]


def test_nothing_can_be_said_of_a_prompt_of_one_token() -> None:
    targets = SparseArray(np.zeros(0, np.int64), np.zeros(0, np.int64), (1, 2))
    answer = sampled(
        replace(REQUEST, prompt=(5,), prompt_logprobs=True, topk_prompt_logprobs=2, target_prompt_logprobs=targets), [], None)
    assert answer.prompt_logprobs is not None and answer.topk_prompt is not None
    assert np.isnan(answer.prompt_logprobs).tolist() == [True] and answer.topk_prompt.ids.tolist() == [[-1, -1]]
    assert answer.target_prompt_logprobs is not None and answer.target_prompt_logprobs.dense().tolist() == [[0.0, 0.0]]


def test_alternatives_to_the_tokens_of_a_prompt_are_drawn_at_the_temperature_and_by_the_seed_of_the_call() -> None:
    request = replace(REQUEST, prompt_alt_tokens_k=1, temperature=0.7, seed=-5)
    assert draws_of(request) == Draws(1, 0.7, -5) and draws_of(REQUEST) is None
    assert draws_of(replace(request, seed=None)) != draws_of(replace(request, seed=None))
    score = PromptScore((NAN, -1.0, -2.0), Version(0), draws=((), ((4, -3.0),), ((5, -2.5),)))
    alt = sampled(request, [], score).prompt_alt
    assert alt is not None and alt.ids.tolist() == [[-1], [4], [5]] and alt.logprobs.tolist() == [[0.0], [-3.0], [-2.5]]
    single = sampled(replace(request, prompt=(5,)), [], None).prompt_alt
    assert single is not None and single.ids.tolist() == [[-1]]
