"""Losses of preference pairs against plain loops in float64, under any split, with masked targets, and far from the reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.algorithms.objectives import OBJECTIVES, keeps_groups, preference_loss
from offbeat.algorithms.preference import answer_values, pair_batch
from offbeat.config.preference import PreferenceConfig
from offbeat.data.batch import Batch, LossSpec, gather_ranges
from offbeat.data.packing import plan_microbatches
from offbeat.data.pairs import EncodedPair
from offbeat.losses.compose import target_losses
from offbeat.losses.targets import Targets

LOSSES = [
    LossSpec("dpo", {"beta": 0.3, "label_smoothing": 0.1}), LossSpec("ipo", {"beta": 0.2}), LossSpec("simpo", {"beta": 2.0, "gamma": 0.5}),
    LossSpec("kto", {"beta": 0.4, "z": 0.7})]


def pair(rng: np.random.Generator, *lengths: int, prompt: int = 2, liked: tuple[bool, ...] = (True, False)) -> EncodedPair:
    """Random tokens: a prompt that all answers share, and answers of these lengths."""
    start = rng.integers(0, 9, prompt)
    sequences = tuple(
        (np.concatenate([start, rng.integers(0, 9, length)]).astype(np.int32), np.arange(prompt + length) >= prompt) for length in lengths)
    return EncodedPair(sequences, liked[: len(lengths)], 0.0, prompt if len(lengths) > 1 else 0)


def samples(loss: LossSpec, *, seed: int = 0) -> Batch:
    """Pairs of unequal lengths, and for kto single answers, too."""
    rng = np.random.default_rng(seed)
    pairs = [pair(rng, 3, 5), pair(rng, 1, 7, prompt=1), pair(rng, 6, 2, prompt=4)]
    if loss.name == "kto":
        pairs += [pair(rng, 4, liked=(False,)), pair(rng, 2, liked=(True,))]
    batch = pair_batch(pairs, loss)
    return batch.with_columns(ref_logprobs=rng.normal(-1, 0.5, batch.num_targets)) if loss.name != "simpo" else batch


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow(logprobs: np.ndarray, batch: Batch, loss: LossSpec) -> float:
    """The mean of the losses over groups, by plain loops."""
    losses = []
    constants = loss.constants
    for group in np.unique(batch.group_ids):
        values = {}
        for sequence in np.flatnonzero(batch.group_ids == group):
            own = range(batch.target_offsets[sequence], batch.target_offsets[sequence + 1])
            d = [float(logprobs[i]) - (0.0 if loss.name == "simpo" else float(batch.columns["ref_logprobs"][i])) for i in own]
            values[int(batch.sequences["signs"][sequence])] = (sum(d), len(d))
        if loss.name == "kto":
            [(sign, (d, _))] = values.items()
            losses.append(1 - sigmoid(sign * constants["beta"] * (d - constants["z"])))
            continue
        (c, num_c), (j, num_j) = values[1], values[-1]
        if loss.name == "dpo":
            x = constants["beta"] * (c - j)
            losses.append(-(1 - constants["label_smoothing"]) * math.log(sigmoid(x)) - constants["label_smoothing"] * math.log(sigmoid(-x)))
        elif loss.name == "ipo":
            losses.append((c / num_c - j / num_j - 1 / (2 * constants["beta"])) ** 2)
        else:
            losses.append(-math.log(sigmoid(constants["beta"] * (c / num_c - j / num_j) - constants["gamma"])))
    return sum(losses) / len(losses)


def logprobs_of(batch: Batch, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(-1.2, 0.6, batch.num_targets).astype(np.float32)


def fast(logprobs: np.ndarray, batch: Batch, micros: list[np.ndarray] | None = None) -> tuple[float, np.ndarray]:
    """Loss and gradient of a batch, in micro-batches."""
    leaf = torch.from_numpy(logprobs).clone().requires_grad_()
    total = 0.0
    for micro in micros or [np.arange(len(batch))]:
        index = gather_ranges(batch.target_offsets, np.sort(micro))
        losses = target_losses(leaf[torch.from_numpy(index)], batch, index).losses.sum()
        losses.backward()
        total += losses.item()
    assert leaf.grad is not None
    return total, leaf.grad.numpy()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_value_and_gradient_are_those_of_plain_loops(loss: LossSpec) -> None:
    batch = samples(loss)
    logprobs = logprobs_of(batch)
    value, gradient = fast(logprobs, batch)
    assert value == pytest.approx(slow(logprobs, batch, loss), rel=1e-6)
    for at in range(batch.num_targets):
        step = np.zeros(batch.num_targets)
        step[at] = 1e-5
        numeric = (slow(logprobs.astype(np.float64) + step, batch, loss) - slow(logprobs.astype(np.float64) - step, batch, loss)) / 2e-5
        assert gradient[at] == pytest.approx(numeric, rel=1e-4, abs=1e-7)
    assert (np.abs(gradient) > 0).all(), "every answer token is trained, and there are no other targets"
    assert sorted(batch.positions + 1) == sorted(np.flatnonzero(np.concatenate([
        np.arange(length) >= length - count for length, count in zip(batch.lengths, np.diff(batch.target_offsets), strict=True)])))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@settings(max_examples=20, deadline=None)
@given(num_ranks=st.integers(1, 3), spare=st.integers(0, 12), share=st.booleans())
def test_any_split_into_ranks_and_micro_batches_is_the_same(loss: LossSpec, num_ranks: int, spare: int, share: bool) -> None:
    batch = samples(loss)
    logprobs = logprobs_of(batch)
    assert keeps_groups(batch)
    plan = plan_microbatches(batch, num_ranks=num_ranks, max_tokens=14 + spare, share_prefix=share, whole_groups=True)
    value, gradient = fast(logprobs, batch, [micro for rank in plan.microbatches for micro in rank])
    whole, whole_gradient = fast(logprobs, batch)
    assert value == pytest.approx(whole, rel=1e-6)
    np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_a_target_without_weight_has_no_gradient_and_no_influence(loss: LossSpec) -> None:
    batch = samples(loss)
    weights = batch.columns["loss_weights"].copy()
    weights[1] = 0.0  # of an answer with three targets
    masked = batch.with_columns(loss_weights=weights)
    results = []
    for junk in (0.0, -5.0, math.nan, -math.inf):
        logprobs = logprobs_of(batch)
        logprobs[1] = junk
        results.append(fast(logprobs, masked))
    for value, gradient in results:
        assert value == results[0][0] and gradient[1] == 0 and np.array_equal(gradient, results[0][1])


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_extremes_stay_finite_and_what_is_not_finite_reaches_the_loss(loss: LossSpec) -> None:
    batch = samples(loss)
    for scale in (1e3, -1e3):
        value, gradient = fast(np.where(batch.sequences["signs"][batch.target_sequences] > 0, scale, -scale).astype(np.float32), batch)
        assert math.isfinite(value) and np.isfinite(gradient).all()
    logprobs = logprobs_of(batch)
    logprobs[0] = math.nan
    assert math.isnan(fast(logprobs, batch)[0])


def test_sums_of_long_answers_keep_a_difference_that_float32_loses() -> None:
    loss, rng = LossSpec("dpo", {"beta": 1.0, "label_smoothing": 0.0}), np.random.default_rng(0)
    batch = pair_batch([pair(rng, 4000, 4000)], loss)
    values = np.full(batch.num_targets, -2.0, np.float32)
    values[4000:] -= np.float32(2e-7)  # the rejected answer is a little less likely at each token
    loss_value, _ = fast(values, batch.with_columns(ref_logprobs=np.zeros(batch.num_targets)))
    gap = 4000 * (float(values[0]) - float(values[-1]))
    assert gap > 0 and loss_value == pytest.approx(-math.log(sigmoid(gap)), rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_metrics_are_means_over_groups(loss: LossSpec) -> None:
    batch = samples(loss)
    logprobs = logprobs_of(batch)
    found = target_losses(torch.from_numpy(logprobs), batch, np.arange(batch.num_targets), report=True).report.groups
    values = answer_values(np.diff(batch.target_offsets).tolist(), logprobs, batch.columns.get("ref_logprobs"), loss=loss.name)
    liked, beta = batch.sequences["signs"] > 0, 1.0 if loss.name == "ipo" else loss.constants["beta"]
    margins = beta * (
        batch.sequences["signs"] * (values - loss.constants["z"]) if loss.name == "kto" else values[liked] - values[~liked])
    np.testing.assert_allclose(found["preference/margin_mean"].numpy(), margins, rtol=1e-9)
    assert found["preference/accuracy"].tolist() == (margins > 0).tolist()
    what = "logprob" if loss.name == "simpo" else "logratio"
    np.testing.assert_allclose(found[f"preference/chosen_{what}_mean"].numpy(), values[liked], rtol=1e-9)
    np.testing.assert_allclose(found[f"preference/rejected_{what}_mean"].numpy(), values[~liked], rtol=1e-9)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_a_rank_without_pairs_reports_the_same_names_of_nothing(loss: LossSpec) -> None:
    batch = samples(loss)
    leaf = torch.zeros(0, requires_grad=True)
    found = target_losses(leaf, batch, np.zeros(0, np.int64), report=True)
    found.losses.sum().backward()
    full = target_losses(torch.from_numpy(logprobs_of(batch)), batch, np.arange(batch.num_targets), report=True)
    assert found.report.groups.keys() == full.report.groups.keys() and all(not len(value) for value in found.report.groups.values())


def test_the_settings_give_the_losses_their_constants() -> None:
    assert preference_loss(PreferenceConfig(label_smoothing=0.2)) == LossSpec("dpo", {"beta": 0.1, "label_smoothing": 0.2})
    assert preference_loss(PreferenceConfig(loss="simpo", gamma=1.0)) == LossSpec("simpo", {"beta": 2.0, "gamma": 1.0})
    assert preference_loss(PreferenceConfig(loss="kto", beta=0.3)) == LossSpec("kto", {"beta": 0.3, "z": 0.0})
    assert preference_loss(PreferenceConfig(loss="ipo")) == LossSpec("ipo", {"beta": 0.1})
    assert {name for name, objective in OBJECTIVES.items() if objective.by_group} >= {"dpo", "ipo", "simpo", "kto"}


def test_targets_of_other_losses_compare_nothing() -> None:
    nothing = torch.zeros(0)
    assert len(Targets(nothing, nothing, nothing, nothing, nothing, nothing > 0, nothing.long(), {}).groups) == 0
