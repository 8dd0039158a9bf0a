"""Shaped draws follow the distribution that a plain loop in float64 computes, and tell its log-probabilities."""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from offbeat.chat.shaping import Shaping
from offbeat.data.tokenizer import character_tokenizer
from offbeat.engine.request import SamplingParams
from offbeat.engine.sampler import Drawn, SamplingRows, sample
from offbeat.engine.shaping import ShapedRows, ShapedSample, bad_word_ids

CPU = torch.device("cpu")
VOCAB, DRAWS, END = 12, 1000, 11
PROMPT, OUTPUT = [1, 1, 2], [3, 3, 5, 2]
LOGITS = np.random.default_rng(3).normal(size=VOCAB)
CHI_SQUARE_999 = {df: df + 3.1 * math.sqrt(2 * df) + 7 for df in range(VOCAB)}
"""Above the 99.9 % quantile of chi-square with so many degrees of freedom."""


@dataclass
class Case:
    """One row's settings."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    bad: list[list[int]] = field(default_factory=list)
    shaping: dict = field(default_factory=dict)


def slow_distribution(case: Case) -> list[float]:
    """One row, token by token: masks, biases, penalties, temperature, min_p, top-k, top-p."""
    shaping = Shaping(**case.shaping)
    scores = []
    for token in range(VOCAB):
        score = float(LOGITS[token])
        score += dict(shaping.logit_bias).get(token, 0.0)
        if token in PROMPT + OUTPUT:
            score = score / shaping.repetition_penalty if score > 0 else score * shaping.repetition_penalty
        score -= shaping.frequency_penalty * Counter(OUTPUT)[token]
        score -= shaping.presence_penalty * (token in OUTPUT)
        banned = shaping.allowed_token_ids and token not in shaping.allowed_token_ids
        banned = banned or any(word[-1] == token and (len(word) == 1 or OUTPUT[-len(word) + 1 :] == word[:-1]) for word in case.bad)
        banned = banned or (token == END and len(OUTPUT) < shaping.min_tokens)
        scores.append(-math.inf if banned else score / case.temperature)
    scores = [-math.inf if score < max(scores) + math.log(shaping.min_p or 1e-300) else score for score in scores]
    order = sorted(range(VOCAB), key=lambda token: -scores[token])
    order = order[: case.top_k or VOCAB]
    total, mass, kept = sum(math.exp(scores[token]) for token in order), 0.0, []
    for token in order:
        kept.append(token)
        mass += math.exp(scores[token]) / total
        if mass >= case.top_p:
            break
    total = sum(math.exp(scores[token]) for token in kept)
    return [math.exp(scores[token]) / total if token in kept else 0.0 for token in range(VOCAB)]


CASES = {
    "min_p": Case(shaping={"min_p": 0.3}),
    "min_p after the temperature": Case(temperature=2.0, shaping={"min_p": 0.3}),
    "presence": Case(shaping={"presence_penalty": 1.5}),
    "frequency": Case(shaping={"frequency_penalty": 0.8}),
    "negative penalties": Case(shaping={"frequency_penalty": -0.5, "presence_penalty": -1.0}),
    "repetition": Case(shaping={"repetition_penalty": 1.8}),
    "repetition below 1": Case(shaping={"repetition_penalty": 0.6}),
    "bias": Case(shaping={"logit_bias": ((0, 2.0), (4, -3.0), (7, 0.5))}),
    "a bias that all but decides": Case(shaping={"logit_bias": ((6, 100.0),)}),
    "bias before the repetition penalty": Case(shaping={"logit_bias": ((2, 4.0), (3, -4.0)), "repetition_penalty": 2.0}),
    "allowed tokens": Case(shaping={"allowed_token_ids": (1, 3, 4, 10)}),
    "bad words": Case(bad=[[0], [5, 2, 7], [2, 8], [3, 9]]),
    "min_tokens not reached": Case(shaping={"min_tokens": 5}),
    "min_tokens reached": Case(shaping={"min_tokens": 4}),
    "everything": Case(
        temperature=1.4, top_p=0.9, top_k=7, bad=[[2, 8]],
        shaping={"min_p": 0.02, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.3, "min_tokens": 9,
                 "logit_bias": ((0, 1.0), (5, -1.0)), "allowed_token_ids": (0, 1, 2, 3, 5, 6, 7, 8, 9, 11)}),
    "nothing": Case(),
}


def shaped_sample(case: Case, *, output: list[int] | None = None) -> ShapedSample:
    params = SamplingParams(max_new_tokens=20, temperature=case.temperature, shaping=Shaping(**case.shaping))
    made = ShapedSample(params, prompt=PROMPT, end_ids=[END], bad_words=tuple(map(tuple, case.bad)))
    for token in OUTPUT if output is None else output:
        made.push(token)
    return made


def batch_of(cases: list[Case], *, each: int, scaled: bool = False, num_top: int = 0) -> SamplingRows:
    """`each` rows of every case; a case without a shaping is a row that has none."""
    rows = [case for case in cases for _ in range(each)]
    samples = [shaped_sample(case) for case in cases]  # reading one changes nothing, so that its rows share it
    shaped = {row: samples[row // each] for row, case in enumerate(rows) if case.shaping or case.bad}
    return SamplingRows(
        temperature=np.array([case.temperature for case in rows], np.float32), top_p=np.array([case.top_p for case in rows], np.float32),
        top_k=np.array([case.top_k for case in rows]), scaled=np.full(len(rows), scaled), num_top=np.full(len(rows), num_top), device=CPU,
        shaped=ShapedRows(list(shaped), list(shaped.values()), device=CPU) if shaped else None)


def draw(cases: list[Case], *, each: int, **settings) -> Drawn:
    logits = torch.tensor(LOGITS, dtype=torch.float32).expand(each * len(cases), -1)
    return sample(logits, batch_of(cases, each=each, **settings), np.random.default_rng(0).random(each * len(cases)))


@pytest.mark.parametrize("name", CASES)
def test_each_setting_draws_from_the_distribution_of_a_plain_loop(name):
    """Beside rows of another shaping and rows without one, whose draws stay as they are."""
    mixed = [CASES[name], CASES["nothing"]]
    drawn = draw(mixed, each=DRAWS)
    for place, case in enumerate(mixed):
        rows = slice(place * DRAWS, (place + 1) * DRAWS)
        expected = np.array(slow_distribution(case))
        counts = np.bincount(drawn.tokens[rows], minlength=VOCAB)
        assert counts[expected == 0].sum() == 0
        likely = expected * DRAWS > 5
        chi_square = ((counts - expected * DRAWS)[likely] ** 2 / (expected * DRAWS)[likely]).sum()
        assert chi_square < CHI_SQUARE_999[likely.sum() - 1 if likely.sum() else 0], (name, counts, expected * DRAWS)
        np.testing.assert_allclose(drawn.logprobs[rows], np.log(expected[drawn.tokens[rows]]), atol=2e-5)
    plain = sample(
        torch.tensor(LOGITS, dtype=torch.float32).expand(2 * DRAWS, -1), batch_of([CASES["nothing"]] * 2, each=DRAWS),
        np.random.default_rng(0).random(2 * DRAWS))
    unshaped = slice(DRAWS, 2 * DRAWS)
    assert (drawn.tokens[unshaped] == plain.tokens[unshaped]).all() and (drawn.logprobs[unshaped] == plain.logprobs[unshaped]).all()


@pytest.mark.parametrize("name", ["everything", "repetition", "allowed tokens"])
def test_log_probabilities_as_trained_are_over_all_tokens_at_the_temperature_alone(name):
    case = CASES[name]
    sampled, trained = draw([case], each=50), draw([case], each=50, scaled=True, num_top=3)
    expected = torch.tensor(LOGITS / case.temperature).log_softmax(-1).numpy()
    assert (sampled.tokens == trained.tokens).all()
    np.testing.assert_allclose(trained.logprobs, expected[trained.tokens], atol=1e-5)
    assert trained.top_ids is not None and trained.top_ids[0].tolist() == np.argsort(-expected)[:3].tolist()


def test_a_greedy_row_takes_the_largest_of_the_shaped_logits_with_their_log_probability():
    case = Case(temperature=0.0, shaping={"logit_bias": ((4, 50.0),), "presence_penalty": 1.0, "min_p": 0.9})
    drawn = draw([case], each=2)
    expected = slow_distribution(Case(shaping={"logit_bias": ((4, 50.0),), "presence_penalty": 1.0}))
    assert drawn.tokens.tolist() == [4, 4]
    np.testing.assert_allclose(drawn.logprobs, math.log(expected[4]), atol=1e-5)


def test_a_row_without_any_token_left_is_told_apart_from_damaged_logits():
    logits = torch.tensor(np.tile(LOGITS, (4, 1)), dtype=torch.float32)
    logits[3, 2] = torch.nan
    cases = [Case(), Case(bad=[[4]], shaping={"allowed_token_ids": (4,)}), Case(), Case(shaping={"presence_penalty": 1.0})]
    drawn = sample(logits, batch_of(cases, each=1), np.full(4, 0.5))
    assert drawn.empty == (1,) and drawn.valid.tolist() == [True, False, True, False]


def test_a_bad_word_is_followed_as_the_tokenizer_writes_it():
    tokenizer = character_tokenizer()
    assert bad_word_ids(["ab", "b", "é"], tokenizer) == tuple(map(tuple, map(tokenizer.encode, ["ab", " ab", "b", " b"])))
    made = shaped_sample(Case(bad=[[7, 8, 9]]), output=[7, 8, 7])
    assert made.banned() == []
    made.push(8)
    assert made.banned() == [9]


def test_token_counts_grow_with_the_sample():
    made = shaped_sample(Case(shaping={"repetition_penalty": 2.0}), output=[*range(3, 400), 5, 5, 1])
    assert made.seen is not None
    told = dict(zip(made.seen.ids.tolist(), made.seen.counts.tolist(), strict=True))
    assert told == {1: 1, 2: 0, **dict.fromkeys(range(3, 400), 1), 5: 3}
