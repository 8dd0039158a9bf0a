"""Draws follow the distribution they claim, their log-probabilities are of that distribution, and seeds fix them."""

import numpy as np
import torch

from offbeat.engine import sampler
from offbeat.engine.sampler import SamplingRows, restrict, row_keys, sample, uniforms


def rows(count: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingRows:
    return make_rows([temperature] * count, [top_p] * count, [top_k] * count)


def make_rows(
    temperature: list[float], top_p: list[float], top_k: list[int], *, scaled: list[bool] | None = None, num_top: list[int] | None = None,
) -> SamplingRows:
    count = len(temperature)
    return SamplingRows(
        temperature=np.array(temperature, np.float32), top_p=np.array(top_p, np.float32), top_k=np.array(top_k),
        scaled=np.array(scaled or [False] * count), num_top=np.array(num_top or [0] * count), device=torch.device("cpu"))


def draw(logits: torch.Tensor, params: SamplingRows, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    drawn = sample(logits, params, uniform)
    assert drawn.top_ids is None and drawn.top_logprobs is None
    return drawn.tokens, drawn.logprobs, drawn.valid


def slow_distribution(logits: np.ndarray, *, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """One row, in plain Python: the likeliest k, then the smallest set of them that holds top_p of their mass."""
    probs = np.exp(logits / temperature - (logits / temperature).max())
    order = np.argsort(-probs)
    kept = order[: top_k or len(order)]
    mass, nucleus = 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += probs[token] / probs[kept].sum()
        if mass >= top_p:
            break
    out = np.zeros_like(probs)
    out[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return out


def test_frequencies_and_logprobs_match_the_restricted_distribution():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=12) * 2
    count = 20000
    cases = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.8, 0), (1.3, 1.0, 4), (0.8, 0.7, 6), (1.0, 1e-6, 0), (2.0, 1.0, 1)]
    for temperature, top_p, top_k in cases:
        expected = slow_distribution(logits, temperature=temperature, top_p=top_p, top_k=top_k)
        params = rows(count, temperature=temperature, top_p=top_p, top_k=top_k)
        tokens, logprobs, _ = draw(torch.tensor(logits, dtype=torch.float32).expand(count, -1), params, rng.random(count))
        frequency = np.bincount(tokens, minlength=12) / count
        assert np.abs(frequency - expected).max() < 0.015, (temperature, top_p, top_k)
        assert frequency[expected == 0].sum() == 0
        assert np.allclose(logprobs, np.log(expected[tokens]), atol=1e-5)


def test_rows_keep_their_own_parameters_in_a_mixed_batch():
    torch.manual_seed(0)
    logits = torch.randn(4, 20) * 3
    temperature, top_p, top_k = [1.0, 0.0, 0.5, 1.0], [1.0, 0.5, 1.0, 0.6], [0, 3, 5, 0]
    mixed = make_rows(temperature, top_p, top_k)
    uniform = np.full(4, 0.6)
    tokens, logprobs, _ = draw(logits, mixed, uniform)
    for row in range(4):
        alone = rows(1, temperature=temperature[row], top_p=top_p[row], top_k=top_k[row])
        token, logprob, _ = draw(logits[[row]], alone, uniform[[row]])
        assert token[0] == tokens[row] and np.isclose(logprob[0], logprobs[row])


def test_greedy_takes_the_largest_logit_with_its_plain_logprob():
    logits = torch.randn(5, 9)
    tokens, logprobs, _ = draw(logits, rows(5, temperature=0, top_p=0.3, top_k=2), np.zeros(5))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert np.allclose(logprobs, logits.log_softmax(-1).max(-1).values, atol=1e-6)


def test_the_extreme_uniforms_draw_possible_tokens():
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 2:4] = 0.0
    tokens, *_ = draw(logits, rows(2), np.array([0.0, 1 - 2.0**-52]))
    assert tokens.tolist() == [2, 3]


def test_top_p_of_one_keeps_tokens_whose_mass_rounds_away():
    logits = torch.tensor([[0.0, -40.0, -50.0]])
    assert torch.equal(restrict(logits, top_p=torch.ones(1, 1), top_k=torch.zeros(1, 1)), logits)


def test_uniforms_are_uniform_and_independent_of_the_batch():
    keys = np.concatenate([row_keys(seed, 8) for seed in range(500)])
    assert len(set(keys.tolist())) == len(keys)
    draws = np.stack([uniforms(keys, np.full(len(keys), position)) for position in range(10)])
    histogram = np.histogram(draws, bins=20, range=(0, 1))[0] / draws.size
    assert np.abs(histogram - 0.05).max() < 0.005
    correlation = np.corrcoef(draws)
    assert np.abs(correlation - np.eye(10)).max() < 0.06
    assert uniforms(keys[7:8], np.array([3]))[0] == draws[3, 7]


def test_a_row_without_a_distribution_is_marked_and_leaves_the_others_alone():
    logits = torch.randn(3, 5)
    expected = draw(logits, rows(3), np.full(3, 0.5))
    for damage in (torch.nan, torch.inf):
        logits[1, 3] = damage
        tokens, logprobs, valid = draw(logits, rows(3), np.full(3, 0.5))
        assert valid.tolist() == [True, False, True] and expected[2].all()
        assert (tokens[valid] == expected[0][valid]).all() and (logprobs[valid] == expected[1][valid]).all()


def test_any_integer_is_a_seed():
    assert len({tuple(row_keys(seed, 2)) for seed in (-1, 0, 1, 2**64 + 5, 10**30)}) == 5


def test_rows_that_want_it_tell_log_probabilities_of_all_tokens_and_draw_as_before():
    torch.manual_seed(1)
    logits, uniform = torch.randn(4, 20) * 3, np.array([0.1, 0.9, 0.5, 0.7])
    shape = [0.7, 1.3, 0.0, 1.0], [0.5, 1.0, 0.5, 1.0], [0, 4, 3, 0]
    plain = sample(logits, make_rows(*shape), uniform)
    scaled = sample(logits, make_rows(*shape, scaled=[True] * 4, num_top=[0, 2, 3, 25]), uniform)
    assert (plain.tokens == scaled.tokens).all() and scaled.top_ids is not None and scaled.top_logprobs is not None
    for row, temperature in enumerate([0.7, 1.3, 1.0, 1.0]):  # the third is greedy: at temperature 1
        table = (logits[row] / temperature).log_softmax(-1)
        assert np.isclose(scaled.logprobs[row], table[scaled.tokens[row]], atol=1e-5)
        assert row in (2, 3) or plain.logprobs[row] > scaled.logprobs[row] + 1e-3
        if row:
            top = table.topk(20)
            assert scaled.top_ids[row - 1].tolist() == top.indices.tolist()
            assert np.allclose(scaled.top_logprobs[row - 1], top.values, atol=1e-5)


def test_the_likeliest_tokens_are_those_of_the_distribution_that_is_drawn_from():
    logits = torch.randn(2, 12)
    drawn = sample(logits, make_rows([0.5, 1.0], [1.0, 1.0], [3, 0], num_top=[5, 0]), np.full(2, 0.5))
    assert drawn.top_ids is not None and drawn.top_logprobs is not None
    assert drawn.top_ids.shape == (1, 5)
    kept = (logits[0] / 0.5).topk(3)
    assert drawn.top_ids[0, :3].tolist() == kept.indices.tolist()
    assert np.allclose(drawn.top_logprobs[0, :3], kept.values.log_softmax(-1), atol=1e-5)
    assert np.isneginf(drawn.top_logprobs[0, 3:]).all()


def test_a_large_vocabulary_is_drawn_from_as_a_small_one(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(300, 5000, generator=generator)
    logits[:, 700:1500] = -torch.inf
    logits[7], logits[8, 3], logits[9] = -torch.inf, torch.nan, torch.inf
    uniform = np.random.default_rng(0).random(300)
    uniform[:3] = 0.0, 1 - 2.0**-53, 0.5
    columns = np.tile(np.array([[1.0, 0.7, 0.0, 1.0]]), (75, 1)).ravel().astype(np.float32)
    rows = SamplingRows(
        temperature=columns, top_p=np.where(np.arange(300) % 4 == 3, 0.5, 1.0).astype(np.float32), top_k=np.zeros(300, np.int64),
        scaled=np.arange(300) % 8 == 3, num_top=(np.arange(300) % 5 == 0) * 4, device=torch.device("cpu"))
    by_blocks = sample(logits, rows, uniform)
    monkeypatch.setattr(sampler, "_BLOCKED_FROM", 1 << 20)
    plainly = sample(logits, rows, uniform)
    assert by_blocks.valid.tolist() == plainly.valid.tolist() == [row not in (7, 8, 9) for row in range(300)]
    same = by_blocks.tokens == plainly.tokens
    assert same[by_blocks.valid].mean() > 0.99, "a uniform number on the edge of a token may fall on either side"
    assert np.isfinite(logits.numpy()[by_blocks.valid, by_blocks.tokens[by_blocks.valid]]).all()
    np.testing.assert_allclose(by_blocks.logprobs[same & by_blocks.valid], plainly.logprobs[same & by_blocks.valid], atol=1e-5)
    asked = np.arange(0, 300, 5)
    sound = by_blocks.valid[asked]
    np.testing.assert_allclose(by_blocks.top_logprobs[sound], plainly.top_logprobs[sound], atol=1e-5)


def test_blocks_without_any_probability_are_never_drawn_from():
    logits = torch.full((4, 5000), -torch.inf)
    logits[:, 4999] = 1.0
    logits[1, 0] = logits[2, 300] = 1.0
    uniform = np.array([0.0, 0.0, 0.49, 1 - 2.0**-53])
    zero = np.zeros(4)
    rows = SamplingRows(
        temperature=np.ones(4, np.float32), top_p=np.ones(4, np.float32), top_k=zero.astype(np.int64), scaled=zero.astype(bool),
        num_top=zero.astype(np.int64), device=torch.device("cpu"))
    assert sample(logits, rows, uniform).tokens.tolist() == [4999, 0, 300, 4999]


def test_logits_in_half_precision_are_drawn_from_as_if_they_were_in_float32():
    logits = (3 * torch.randn(40, 5000, generator=torch.Generator().manual_seed(0))).bfloat16()
    columns = [1.0] * 40, [1.0] * 40, [0] * 40
    for width in (5000, 300):
        some, uniform = logits[:, :width], np.random.default_rng(0).random(40)
        half, wide = (sample(form, make_rows(*columns, num_top=[3] * 40), uniform) for form in (some, some.float()))
        for name in ("tokens", "logprobs", "top_logprobs"):
            np.testing.assert_array_equal(getattr(half, name), getattr(wide, name))
