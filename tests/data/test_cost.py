"""Work against counted pairs, priors against counted weights, and fits against numpy's least squares."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data.balance import partition
from offbeat.data.cost import TOKENS, CostFit, CostModel, prior, run_work
from offbeat.errors import DataError

TRUE = CostModel(2e-5, 3e-8, 0.02)
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936}


def times(model, work):
    return model.linear * work[:, 0] + model.quadratic * work[:, 1] + model.constant


def rank_work(rng, *, num_ranks, model, num_sequences=32):
    """[R, 2], balanced by a model as a run does it."""
    work = run_work(rng.lognormal(4.0, 0.9, num_sequences).clip(16, 2048).round())
    return np.stack([work[list(part)].sum(axis=0) for part in partition(model.load(work), num_ranks).parts])


def train(fit, true, *, num_steps, num_ranks=4, noise=0.0, seed=0, first_step=1.0, num_sequences=32):
    """Let a fit see what ranks of a true cost would measure; returns all work and times."""
    rng = np.random.default_rng(seed)
    seen = []
    for step in range(num_steps):
        work = rank_work(rng, num_ranks=num_ranks, model=fit.model, num_sequences=num_sequences)
        seconds = times(true, work) * (1 + noise * rng.standard_normal(num_ranks)) * (first_step if step == 0 else 1.0)
        fit.observe(work, seconds)
        seen.append((work, seconds))
    return seen


@given(st.integers(0, 30), st.lists(st.integers(0, 30), max_size=4))
def test_the_squares_of_runs_are_twice_their_pairs_and_a_shared_prompt_counts_once(prompt, answers):
    work = run_work(prompt) + run_work(answers, prompt).sum(axis=0)
    pairs = sum(i + 1 for i in range(prompt)) + sum(prompt + i + 1 for answer in answers for i in range(answer))
    tokens = prompt + sum(answers)
    assert work.tolist() == [tokens, 2 * pairs - tokens]  # a token's pair with itself is left to the linear part
    if len(answers) == 1:
        assert work.tolist() == run_work(tokens).tolist()


def test_a_load_is_linear_in_the_work_and_leaves_the_constant_out():
    assert CostModel(2.0, 0.5, 9.0).load(run_work([3, 4])).tolist() == [6 + 4.5, 8 + 8]
    assert TOKENS.load(run_work([[3, 4], [0, 7]])).tolist() == [[3, 4], [0, 7]]
    assert run_work([]).shape == (0, 2) and TOKENS.load(run_work([])).shape == (0,)


def test_the_prior_of_a_dense_model_counts_its_weights():
    per_layer = 1024 * 16 * 128 * 2 + 1024 * 8 * 128 * 2 + 3 * 1024 * 3072
    model = prior(QWEN3)
    assert model.linear == pytest.approx(6 * (28 * per_layer + 1024 * 151936) / 1e12)
    # Scores and values: 2 x 2 operations per pair and dimension of a head, three passes, and half a pair per square.
    assert model.quadratic == pytest.approx(3 * 2 * 2 * 28 * 16 * 128 / 2 / 1e12)
    assert model.constant == 0
    assert prior({"model_type": "x", "text_config": QWEN3}) == model


def test_the_prior_of_a_mixture_of_experts_counts_those_that_a_token_visits():
    sparse = prior(QWEN3 | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 384})
    assert sparse == prior(QWEN3)  # 8 x 384 = 3072
    shared = prior(QWEN3 | {"num_experts_per_tok": 2, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024})
    assert shared == prior(QWEN3)


def test_sizes_that_a_configuration_does_not_name_are_guessed():
    gpt2 = prior({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None})
    assert gpt2.linear == pytest.approx(6 * 12 * 12 * 768**2 / 1e12)  # 12 width² weights per layer
    assert gpt2.quadratic == pytest.approx(6 * 12 * 768 / 1e12)
    for odd in ({"model_type": "unknown"}, {"hidden_size": "wide", "num_attention_heads": [4, 8], "num_hidden_layers": 0}):
        model = prior(odd)
        assert model.linear / model.quadratic == pytest.approx(12 * 2048, rel=1e-3)


@pytest.mark.parametrize("values", [(-1.0, 0.0, 0.0), (1.0, float("nan"), 0.0), (1.0, 0.0, float("inf"))])
def test_negative_and_infinite_coefficients_are_refused(values):
    with pytest.raises(DataError, match="must be finite and not negative, got"):
        CostModel(*values)


@pytest.mark.parametrize("wrong", [CostModel(1e-3, 1e-8), CostModel(1e-9, 1e-10), CostModel(2e-5, 3e-8)])
def test_a_wrong_prior_converges_to_the_truth(wrong):
    fit = CostFit(wrong)
    train(fit, TRUE, num_steps=60, num_ranks=8, num_sequences=16)
    assert fit.model.linear == pytest.approx(TRUE.linear, rel=0.1)
    assert fit.model.quadratic == pytest.approx(TRUE.quadratic, rel=0.15)
    assert fit.model.constant == pytest.approx(TRUE.constant, rel=0.1)


def test_a_fit_comes_near_numpys_least_squares_of_the_relative_error():
    fit = CostFit(CostModel(1e-5, 1e-8))
    seen = train(fit, TRUE, num_steps=40, num_ranks=8, num_sequences=16, noise=0.03)
    rows, weights = [], []
    for age, (work, seconds) in enumerate(reversed(seen)):
        rows.append(np.column_stack([work, np.ones(len(work))]) / seconds[:, None])
        weights += [0.95 ** (age / 2) * (0.1 if age == len(seen) - 1 else 1.0)] * len(work)
    matrix = np.concatenate(rows) * np.array(weights)[:, None]
    scale = np.abs(matrix).max(axis=0)
    exact = np.linalg.lstsq(matrix / scale, np.array(weights), rcond=None)[0] / scale
    work = np.concatenate([work for work, _ in seen])
    ours, theirs = times(fit.model, work), np.column_stack([work, np.ones(len(work))]) @ exact
    np.testing.assert_allclose(ours, theirs, rtol=0.02)


def test_a_slow_first_step_is_soon_forgotten():
    fit, spoiled = CostFit(CostModel(1e-5, 1e-8)), CostFit(CostModel(1e-5, 1e-8))
    train(fit, TRUE, num_steps=4)
    train(spoiled, TRUE, num_steps=4, first_step=20.0)
    work = run_work([1000, 4000])
    np.testing.assert_allclose(spoiled.model.load(work), fit.model.load(work), rtol=0.1)


def test_a_fit_follows_a_change_of_speed():
    fit = CostFit(CostModel(1e-5, 1e-8))
    train(fit, TRUE, num_steps=30)
    slower = CostModel(2 * TRUE.linear, 8 * TRUE.quadratic, TRUE.constant)
    train(fit, slower, num_steps=120, seed=1)
    work = run_work([50, 500, 2000])
    np.testing.assert_allclose(fit.model.load(work), slower.load(work), rtol=0.1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 3000), st.floats(0, 1e3)), min_size=1, max_size=4), max_size=6))
def test_no_times_make_a_coefficient_negative_or_every_load_zero(steps):
    fit = CostFit(CostModel(1e-5, 1e-8))
    for step in steps:
        fit.observe(run_work([length for length, _ in step]), [seconds for _, seconds in step])
        assert min(fit.model.linear, fit.model.quadratic, fit.model.constant) >= 0
        assert fit.model.load(run_work(100)) > 0


def test_like_times_of_like_ranks_keep_the_ratio_of_the_prior():
    fit = CostFit(CostModel(1e-5, 1e-8))
    for _ in range(20):
        fit.observe(run_work([512, 512]), [0.1, 0.1])
    assert fit.model.quadratic / fit.model.linear == pytest.approx(1e-3, rel=1e-6)
    assert fit.model.constant < 0.02


def test_steps_that_say_nothing_change_nothing():
    fit = CostFit(TRUE)
    fit.observe(np.zeros((2, 2)), [0.1, 0.2])
    fit.observe(run_work([5, 6]), [0.0, 0.0])
    assert fit.model == TRUE


@pytest.mark.parametrize("busy_s", [[1.0], [1.0, float("nan")], [1.0, -0.1], []])
def test_bad_times_are_refused(busy_s):
    with pytest.raises(DataError, match="busy_s must be 2 finite times, none negative"):
        CostFit(TRUE).observe(run_work([5, 6]), busy_s)
