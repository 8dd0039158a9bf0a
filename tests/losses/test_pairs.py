"""Losses of preference pairs against plain loops in float64, under any split, with masked targets, and far from the reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.algorithms.objectives import first_of, keeps_groups, preference_loss
from offbeat.algorithms.preference import answer_values, pair_batch
from offbeat.config.objectives import OBJECTIVES
from offbeat.config.preference import PAIR_LOSSES, PreferenceConfig
from offbeat.data.batch import Batch, LossSpec
from offbeat.data.packing import plan_microbatches
from offbeat.data.pairs import EncodedPair
from offbeat.data.ranges import gather_ranges
from offbeat.losses.compose import target_losses
from offbeat.losses.targets import Targets
from waits import DEVICE, HostWaits

LOSSES = [
    LossSpec("dpo", {"beta": 0.3, "label_smoothing": 0.1}), LossSpec("ipo", {"beta": 0.2}), LossSpec("simpo", {"beta": 2.0, "gamma": 0.5}),
    LossSpec("kto", {"beta": 0.4, "z": 0.7, "desirable_weight": 1.3, "undesirable_weight": 0.6}),
    LossSpec("robust", {"beta": 0.3, "label_smoothing": 0.1}), LossSpec("hinge", {"beta": 0.3}),
    LossSpec("exo_pair", {"beta": 0.3, "label_smoothing": 0.05}), LossSpec("nca_pair", {"beta": 0.3}), LossSpec("bco_pair", {"beta": 0.3}),
    LossSpec("sppo_hard", {"beta": 0.3}), LossSpec("apo_zero", {"beta": 0.3}), LossSpec("apo_down", {"beta": 0.3}),
    LossSpec("sigmoid_norm", {"beta": 3.0}), LossSpec("orpo", {"beta": 0.3}), LossSpec("sft"),
    LossSpec("mix", {"dpo": 0.8, "sft": 0.2, "simpo": 0.5, "dpo.beta": 0.3, "dpo.label_smoothing": 0.1, "simpo.beta": 2.0,
                     "simpo.gamma": 0.5})]
WITHOUT_REFERENCE = ("simpo", "orpo", "sft")


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
    return batch.with_columns(ref_logprobs=rng.normal(-1, 0.5, batch.num_targets)) if loss.name not in WITHOUT_REFERENCE else batch


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow(logprobs: np.ndarray, batch: Batch, loss: LossSpec) -> float:
    """The mean of the losses over groups, by plain loops and the formulas of the papers."""
    if loss.name == "mix":
        names = [name for name in loss.constants if "." not in name]
        return sum(loss.constants[name] * slow(logprobs, batch, LossSpec(name, {
            key.split(".")[1]: value for key, value in loss.constants.items() if key.startswith(name + ".")})) for name in names)
    losses = []
    beta, e = loss.constants.get("beta", 0.0), loss.constants.get("label_smoothing", 0.0)
    for group in np.unique(batch.group_ids):
        values = {}
        for sequence in np.flatnonzero(batch.group_ids == group):
            own = range(batch.target_offsets[sequence], batch.target_offsets[sequence + 1])
            plain = [float(logprobs[i]) for i in own]
            d = plain if loss.name in WITHOUT_REFERENCE else [float(logprobs[i]) - float(batch.columns["ref_logprobs"][i]) for i in own]
            values[int(batch.sequences["signs"][sequence])] = (sum(d), len(d))
        if loss.name == "kto":
            [(sign, (d, _))] = values.items()
            weight = loss.constants["desirable_weight" if sign > 0 else "undesirable_weight"]
            losses.append(weight * (1 - sigmoid(sign * beta * (d - loss.constants["z"]))))
            continue
        (c, num_c), (j, num_j) = values[1], values[-1]
        x, by_token = beta * (c - j), beta * (c / num_c - j / num_j)
        match loss.name:
            case "dpo":
                losses.append(-(1 - e) * math.log(sigmoid(x)) - e * math.log(sigmoid(-x)))
            case "robust":
                losses.append((-(1 - e) * math.log(sigmoid(x)) + e * math.log(sigmoid(-x))) / (1 - 2 * e))
            case "hinge":
                losses.append(max(0.0, 1 - x))
            case "exo_pair":  # KL between (s(x), s(-x)) and (1 - e, e)
                p = [sigmoid(x), sigmoid(-x)]
                losses.append(sum(mine * math.log(mine / theirs) for mine, theirs in zip(p, (1 - e, e), strict=True)))
            case "nca_pair":
                losses.append(-math.log(sigmoid(beta * c)) - 0.5 * math.log(sigmoid(-beta * c)) - 0.5 * math.log(sigmoid(-beta * j)))
            case "bco_pair":
                losses.append(-math.log(sigmoid(beta * c)) - math.log(sigmoid(-beta * j)))
            case "sppo_hard":
                losses.append((c - 0.5 / beta) ** 2 + (j + 0.5 / beta) ** 2)
            case "apo_zero":
                losses.append(1 - sigmoid(beta * c) + sigmoid(beta * j))
            case "apo_down":
                losses.append(sigmoid(beta * c) + 1 - sigmoid(x))
            case "ipo":
                losses.append((c / num_c - j / num_j - 1 / (2 * beta)) ** 2)
            case "sigmoid_norm":
                losses.append(-math.log(sigmoid(by_token)))
            case "simpo":
                losses.append(-math.log(sigmoid(by_token - loss.constants["gamma"])))
            case "orpo":
                odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (c / num_c, j / num_j)]
                losses.append(-c / num_c - beta * math.log(sigmoid(math.log(odds[0] / odds[1]))))
            case "sft":
                losses.append(-c / num_c)
            case _:
                raise AssertionError(loss.name)
    return sum(losses) / len(losses)


def logprobs_of(batch: Batch, seed: int = 1) -> np.ndarray:
    """Log-probabilities, all below 0."""
    return -np.abs(np.random.default_rng(seed).normal(-1.2, 0.6, batch.num_targets)).astype(np.float32)


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
    trained = batch.sequences["signs"][batch.target_sequences] > (0 if loss.name == "sft" else -2)
    assert (np.abs(gradient) > 0).tolist() == trained.tolist(), "every answer token is trained, of sft the chosen ones"
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
    loss = first_of(loss)
    values = answer_values(np.diff(batch.target_offsets).tolist(), logprobs, batch.columns.get("ref_logprobs"), loss=loss.name)
    liked, beta = batch.sequences["signs"] > 0, 1.0 if loss.name == "ipo" else loss.constants.get("beta", 1.0)
    margins = beta * (
        batch.sequences["signs"] * (values - loss.constants["z"]) if loss.name == "kto" else values[liked] - values[~liked])
    found = {name: values[where].numpy() for name, (values, where) in found.items()}
    np.testing.assert_allclose(found["preference/margin_mean"], margins, rtol=1e-9)
    assert found["preference/accuracy"].tolist() == (margins > 0).tolist()
    what = "logprob" if loss.name in WITHOUT_REFERENCE else "logratio"
    np.testing.assert_allclose(found[f"preference/chosen_{what}_mean"], values[liked], rtol=1e-9)
    np.testing.assert_allclose(found[f"preference/rejected_{what}_mean"], values[~liked], rtol=1e-9)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_a_rank_without_pairs_reports_the_same_names_of_nothing(loss: LossSpec) -> None:
    batch = samples(loss)
    leaf = torch.zeros(0, requires_grad=True)
    found = target_losses(leaf, batch, np.zeros(0, np.int64), report=True)
    found.losses.sum().backward()
    full = target_losses(torch.from_numpy(logprobs_of(batch)), batch, np.arange(batch.num_targets), report=True)
    assert found.report.groups.keys() == full.report.groups.keys() and all(
        not len(values) and not len(where) for values, where in found.report.groups.values())


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_a_loss_of_pairs_and_its_report_never_wait_for_the_device(loss: LossSpec) -> None:
    batch = samples(loss)
    logprobs = torch.zeros(batch.num_targets, device=DEVICE, requires_grad=True)
    with HostWaits() as waits:
        target_losses(logprobs, batch, np.arange(batch.num_targets), report=True).losses.sum().backward()
    assert waits.found == []


def test_the_settings_give_the_losses_their_constants() -> None:
    assert preference_loss(PreferenceConfig(label_smoothing=0.2)) == LossSpec("dpo", {"beta": 0.1, "label_smoothing": 0.2})
    assert preference_loss(PreferenceConfig(loss="simpo", gamma=1.0)) == LossSpec("simpo", {"beta": 2.0, "gamma": 1.0})
    assert preference_loss(PreferenceConfig(loss="kto", beta=0.3, desirable_weight=2.0)) == LossSpec(
        "kto", {"beta": 0.3, "z": 0.0, "desirable_weight": 2.0, "undesirable_weight": 1.0})
    assert preference_loss(PreferenceConfig(loss="exo_pair")) == LossSpec("exo_pair", {"beta": 0.1, "label_smoothing": 1e-3})
    assert preference_loss(PreferenceConfig(loss="sigmoid_norm")) == LossSpec("sigmoid_norm", {"beta": 5.0})
    mixed = preference_loss(PreferenceConfig(mix={"simpo": 0.8, "sft": 0.2}, gamma=1.0))
    assert mixed == LossSpec("mix", {"simpo": 0.8, "sft": 0.2, "simpo.beta": 2.0, "simpo.gamma": 1.0})
    assert first_of(mixed) == LossSpec("simpo", {"beta": 2.0, "gamma": 1.0})
    assert preference_loss(PreferenceConfig(loss="ipo")) == LossSpec("ipo", {"beta": 0.1})
    assert {name for name, objective in OBJECTIVES.items() if objective.group} == {*PAIR_LOSSES, "kto", "mix", "bradley_terry"}


def test_an_answer_without_doubt_has_finite_odds() -> None:
    loss = LossSpec("orpo", {"beta": 0.3})
    batch = samples(loss)
    for value in (0.0, -1e-30):
        total, gradient = fast(np.full(batch.num_targets, value, np.float32), batch)
        assert math.isfinite(total) and np.isfinite(gradient).all()


def test_unbalanced_labels_can_be_balanced() -> None:
    """Three good answers and one bad one, all as likely as under the reference: with a weight of 3 the bad one pulls as strongly."""
    rng = np.random.default_rng(0)
    loss = LossSpec("kto", {"beta": 0.1, "z": 0.0, "desirable_weight": 1.0, "undesirable_weight": 3.0})
    pairs = [*(pair(rng, 2, liked=(True,)) for _ in range(3)), pair(rng, 2, liked=(False,))]
    batch = pair_batch(pairs, loss)
    logprobs = logprobs_of(batch)
    _, gradient = fast(logprobs, batch.with_columns(ref_logprobs=logprobs))
    assert gradient[:6].sum() == pytest.approx(-gradient[6:].sum()) and gradient[6] > 0


def test_targets_of_other_losses_compare_nothing() -> None:
    nothing = torch.zeros(0)
    assert len(Targets(nothing, nothing, nothing, nothing, nothing, nothing > 0, nothing.long(), {}).groups) == 0
