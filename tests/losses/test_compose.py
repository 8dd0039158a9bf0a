"""Whole losses: against a slow version, as they were released, under any split, and where a target is masked."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from datum_samples import LOSSES_OF_ALL, make_datums, reference
from offbeat.algorithms.objectives import CLIENT_LOSSES, client_loss, policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.objectives import OBJECTIVES
from offbeat.config.presets import PRESETS as ALGORITHMS
from offbeat.data.batch import Batch, FilterSpec, LossSpec, RegulariserSpec, WeightSpec
from offbeat.losses.compose import target_losses
from released_losses import client_losses, decoupled_ppo
from slow_losses import random_batch, slow_losses
from waits import DEVICE, HostWaits

PPO = LossSpec("ppo", {"clip_low": 0.8, "clip_high": 1.2, "dual_clip": 0.0}, anchor="prox", own_samples=True)
MASK5 = WeightSpec("mask", "token", 0.0, 5.0)


def own(name, anchor="prox", **parts):
    """A loss over a run's own samples, with the default constants of its objective."""
    constants = {key: constant.default for key, constant in OBJECTIVES[name].constants.items()}
    return LossSpec(name, {**constants, **parts.pop("constants", {})}, anchor=anchor, own_samples=True, **parts)


PRESETS = {
    "grpo": replace(PPO, weight=MASK5),
    "dapo": own("ppo", constants={"clip_high": 1.28, "dual_clip": 3.0}),
    "gspo": own("gspo", constants={"clip_low": 0.9, "clip_high": 1.1}),
    "cispo": own("cispo", constants={"clip_high": 1.3}, weight=MASK5),
    "aipo": own("cispo", "rollout", constants={"clip_high": 1.3}),
    "sapo": own("sapo"),
    "gmpo": own("gmpo", constants={"clip_low": 0.2, "clip_high": 0.2}),
    "gmpo, filtered": own("gmpo", constants={"clip_low": 0.2, "clip_high": 0.2}, filters=(FilterSpec("k2", high=0.05),)),
    "tis": replace(PPO, weight=WeightSpec("clamp", "token", 0.7, 1.3)),
    "icepop": replace(PPO, weight=WeightSpec("mask", "token", 0.7, 1.3)),
    "mis": replace(PPO, weight=WeightSpec("mask", "sequence", 0.5, 2.0)),
    "geometric": replace(PPO, weight=WeightSpec("clamp", "geometric", 0.9, 1.1)),
    "decoupled": replace(PPO, weight=WeightSpec("ratio", "token")),
    "kpop": replace(PPO, filters=(FilterSpec("binary_kl", high=0.02),)),
    "dppo": own("dppo", "rollout", constants={"clip_low": 0.05, "clip_high": 0.05}),
    "dppo, kl": own("dppo", "rollout", constants={"clip_low": 0.01, "clip_high": 0.01, "divergence": "kl"}),
    "prime_rl": own("dppo", "rollout", constants={"clip_low": 0.05, "clip_high": 0.05}, regularisers=(RegulariserSpec("drift", 1e-1),)),
    "clip_cov": replace(PPO, filters=(FilterSpec("clip_cov", low=1.0, high=5.0, share=2e-4),)),
    "kl_cov": own("importance_sampling", regularisers=(RegulariserSpec("kl_cov", 1.0, 2e-3),)),
    "m2po": own("importance_sampling", "rollout", filters=(FilterSpec("m2", high=0.04),)),
    "opd": own("importance_sampling", "rollout", filters=(FilterSpec("tv", low=-0.02, high=0.3),)),
    "forward_kl": own("forward_kl", "rollout"),
    "reverse_kl": own("reverse_kl", "rollout"),
    "deepseek_v32": replace(
        PPO, filters=(FilterSpec("opsm", "sequence", high=0.1),), regularisers=(RegulariserSpec("ratio_k3", 0.3),)),
    "reinforce_pp_baseline": replace(PPO, regularisers=(RegulariserSpec("k2", 0.3), RegulariserSpec("k3", 0.2))),
    "raft": own("cross_entropy"),
    "reinforce": own("reinforce", weight=MASK5),
    "dro": own("dro", "rollout"),
    "entropy": replace(PPO, weight=MASK5, regularisers=(RegulariserSpec("entropy", 0.05), RegulariserSpec("drift", 0.1))),
    "filters": replace(PPO, weight=WeightSpec("clamp", high=2.0), filters=(
        FilterSpec("ratio", "sequence", "mean", 0.7, 1.4), FilterSpec("k3", "sequence", "max", high=0.6), FilterSpec("k1", low=-1.2))),
}


def fast(batch, logprobs, entropy=None):
    """Losses [M] and gradients by log-probability and, if it is given, entropy, in float64."""
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    given = None if entropy is None else torch.tensor(entropy, dtype=torch.float64, requires_grad=True)
    losses = target_losses(leaf, batch, np.arange(batch.num_targets), entropy=given).losses
    losses.sum().backward()
    return losses.detach(), leaf.grad, None if given is None else given.grad


def slow(batch, logprobs, entropy=None):
    leaves = [torch.tensor(float(value), dtype=torch.float64, requires_grad=True) for value in logprobs]
    given = None if entropy is None else [torch.tensor(float(value), dtype=torch.float64, requires_grad=True) for value in entropy]
    losses = slow_losses(batch, leaves, given)
    (sum(losses) + 0 * sum(leaves)).backward()

    def gradients(scalars):
        return torch.stack([torch.zeros(()).double() if leaf.grad is None else leaf.grad for leaf in scalars])

    return torch.stack(losses).detach(), gradients(leaves), None if given is None else gradients(given)


def entropies(batch, loss):
    wanted = any(term.kind == "entropy" for term in loss.regularisers)
    return np.random.default_rng(1).uniform(0, 2, batch.num_targets) if wanted else None


def assert_equals_the_slow_version(batch, logprobs):
    entropy = entropies(batch, batch.losses[0])
    for got, expected in zip(fast(batch, logprobs, entropy), slow(batch, logprobs, entropy), strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("equal_advantages", [True, False])
@pytest.mark.parametrize("with_prox", [True, False])
def test_a_loss_and_its_gradient_equal_the_slow_version(name, equal_advantages, with_prox):
    for seed in range(3):
        batch, logprobs = random_batch(PRESETS[name], seed=seed, equal_advantages=equal_advantages)
        if not with_prox:
            del batch.columns["prox_logprobs"]
        assert_equals_the_slow_version(batch, logprobs)


@pytest.mark.parametrize("name", PRESETS)
def test_extreme_ratios_masks_and_single_tokens_equal_the_slow_version(name):
    for seed in range(3):
        batch, logprobs = random_batch(PRESETS[name], seed=seed, spread=8.0, lengths=(1, 1, 6, 3, 1, 2))
        batch.columns["loss_weights"][[2, 5]] = 0.0
        logprobs[[3, 9]], batch.columns["prox_logprobs"][[4, 10]] = -60.0, -70.0
        batch.columns["rollout_logprobs"][6] = -80.0
        assert_equals_the_slow_version(batch, logprobs)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", PRESETS)
def test_a_rollout_logprob_that_is_not_finite_equals_the_slow_version_and_is_finite(name, value):
    batch, logprobs = random_batch(PRESETS[name], seed=4)
    batch.columns["rollout_logprobs"][[2, 7]] = value
    assert_equals_the_slow_version(batch, logprobs)
    assert all(values is None or values.isfinite().all() for values in fast(batch, logprobs, entropies(batch, PRESETS[name])))


@pytest.mark.parametrize("name", PRESETS)
def test_any_split_into_micro_batches_of_whole_sequences_gives_the_same_losses_and_gradients(name):
    batch, logprobs = random_batch(PRESETS[name], seed=5)
    entropy = entropies(batch, PRESETS[name])
    losses, gradient, _ = fast(batch, logprobs, entropy)
    for parts in ([[0, 2, 5], [1, 3, 4, 6]], [[i] for i in range(7)], [[], [6], [0, 1, 2, 3, 4, 5]]):
        for part in parts:
            index = np.flatnonzero(np.isin(batch.target_sequences, part))
            leaf = torch.tensor(logprobs[index], dtype=torch.float64, requires_grad=True)
            of_part = None if entropy is None else torch.tensor(entropy[index])
            own_losses = target_losses(leaf, batch, index, entropy=of_part).losses
            own_losses.sum().backward()
            torch.testing.assert_close(own_losses.detach(), losses[index], rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(leaf.grad, gradient[index], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", PRESETS)
def test_a_target_of_weight_zero_adds_exactly_nothing_whatever_it_holds(name, poison):
    batch, logprobs = random_batch(PRESETS[name], seed=6)
    masked = np.arange(batch.num_targets) % 3 == 1
    batch.columns["loss_weights"][masked] = 0.0
    entropy = entropies(batch, PRESETS[name])
    expected = fast(batch, logprobs, entropy)
    for column in (*batch.columns, "current"):
        if column == "loss_weights" or column == "m2_mask":
            continue
        poisoned = logprobs.copy()
        if column == "current":
            poisoned[masked] = poison
        changed = batch.with_columns(**{
            name: np.where(masked & (name == column), poison, values) for name, values in batch.columns.items()})
        got = fast(changed, poisoned, None if entropy is None else np.where(masked, poison, entropy))
        for mine, theirs in zip(got[:2], expected[:2], strict=True):
            assert torch.equal(mine, theirs) and not mine[torch.from_numpy(masked)].any(), column


@pytest.mark.parametrize("current", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("with_prox", [True, False])
@pytest.mark.parametrize("name", PRESETS)
def test_a_current_logprob_that_is_not_finite_reaches_the_loss(name, current, with_prox):
    loss = replace(PRESETS[name], filters=tuple(rule for rule in PRESETS[name].filters if rule.metric not in ("m2", "clip_cov")))
    batch, logprobs = random_batch(loss, seed=7, spread=0.01)
    if not with_prox:
        del batch.columns["prox_logprobs"]
    where = int(np.flatnonzero(batch.columns["advantages"] > 0)[0])
    logprobs[where] = current
    leaf = torch.tensor(logprobs, requires_grad=True)
    entropy = entropies(batch, loss)
    losses = target_losses(leaf, batch, np.arange(len(logprobs)), entropy=None if entropy is None else torch.tensor(entropy)).losses
    assert not losses.sum().isfinite()


# -- as they were released -----------------------------------------------------------------------------------------------------------------


def extreme_tokens(seed, count=400):
    """Prox, rollout, current and advantages [M] float32, at and beyond every bound."""
    rng = np.random.default_rng(seed)
    rollout = -rng.uniform(0, 4, count)
    prox = rollout + rng.standard_normal(count) * rng.choice([0, 0.3, 3, 30], count)
    current = prox + rng.standard_normal(count) * rng.choice([0, 0.2, 5, 50], count)
    advantages = rng.standard_normal(count) * rng.choice([0, 1, 1, 10], count)
    return [torch.tensor(values, dtype=torch.float32) for values in (prox, rollout, current, advantages)]


@pytest.mark.parametrize("mode", ["none", "mask", "clamp"])
@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
@pytest.mark.parametrize("with_prox", [True, False])
def test_the_default_loss_is_to_the_bit_the_one_that_was_released(mode, dual_clip, with_prox):
    config = AlgorithmConfig(behave_weight=mode, behave_cap=2.0, dual_clip=dual_clip, clip_low=0.2, clip_high=0.28)
    for seed in range(4):
        prox, rollout, current, advantages = extreme_tokens(seed)
        weights = torch.tensor(np.random.default_rng(seed).uniform(0, 1e-3, len(prox)), dtype=torch.float32)
        batch = Batch.of_next_tokens(
            np.zeros(401, np.int32), np.arange(401) > 0, lengths=[401], losses=(policy_loss(config),),
            columns={name: np.concatenate([[0], values.numpy()]) for name, values in (
                ("rollout_logprobs", rollout), ("advantages", advantages), ("loss_weights", weights), ("prox_logprobs", prox))})
        if not with_prox:
            del batch.columns["prox_logprobs"]
        mine, theirs = (current.clone().requires_grad_() for _ in range(2))
        got = target_losses(mine, batch, np.arange(400), report=True)
        losses, means, maxima = decoupled_ppo(
            theirs, prox if with_prox else theirs.detach(), rollout, advantages, clip_low=1.0 - 0.2, clip_high=1.0 + 0.28,
            dual_clip=dual_clip, mode=mode, cap=2.0)
        losses = losses * weights
        assert torch.equal(got.losses, losses)
        (2 * got.losses.sum()).backward()
        (2 * losses.sum()).backward()
        assert torch.equal(mine.grad, theirs.grad) and mine.grad.any()
        for name, values in means.items():
            assert torch.equal(got.report.means[name], values), name
        for name, values in maxima.items():
            assert torch.equal(got.report.maxima[name], values), name


@pytest.mark.parametrize("spec", LOSSES_OF_ALL, ids=CLIENT_LOSSES)
@pytest.mark.parametrize("spread", [0.3, 30.0])
def test_a_clients_loss_is_to_the_bit_the_one_that_was_released(spec, spread):
    for dense in (True, False):
        batch = make_datums(20, seed=3, losses=(spec,), dense=dense)
        columns = {name: torch.from_numpy(values) for name, values in batch.columns.items()}
        current = columns["rollout_logprobs"] + spread * torch.randn(batch.num_targets, generator=torch.Generator().manual_seed(1))
        mine, theirs = (current.clone().requires_grad_() for _ in range(2))
        got = target_losses(mine, batch, np.arange(batch.num_targets)).losses
        expected = client_losses(spec.name, theirs, columns, torch.from_numpy(batch.target_sequences), spec.constants)
        expected = expected * columns["loss_weights"]
        assert torch.equal(got, expected)
        got.sum().backward()
        expected.sum().backward()
        assert torch.equal(mine.grad, theirs.grad) and mine.grad.any()


DEFAULT = {
    "losses": [0.340319467056, -0.080127290737, 0.846925698734, -0.423827960617, -0.095221775163, -0.068838216724],
    "gradient": [0.0, 0.0, 0.846925698734, 0.0, -0.095221775163, 0.0]}
CLIENTS = {  # sum of the losses, and of the gradients times their indices
    "cross_entropy": (32.93975950218737, -2066.5640540383756), "importance_sampling": (-4.893671755562536, 1104.3650560104288),
    "ppo": (-0.5261824846966192, 2890.6763429106213), "cispo": (25.739586167037487, 752.0986041747965),
    "dro": (34.359213455580175, 394.19013636000454), "gspo": (-8.255662449169904, 453.5496233422309)}


def test_the_default_loss_has_the_numbers_that_it_had_when_it_was_released():
    batch, logprobs = random_batch(policy_loss(AlgorithmConfig()), lengths=(2, 1, 3), seed=2, equal_advantages=False)
    losses, gradient, _ = fast(batch, logprobs)
    assert losses.tolist() == pytest.approx(DEFAULT["losses"], rel=1e-6)
    assert gradient.tolist() == pytest.approx(DEFAULT["gradient"], rel=1e-6)


@pytest.mark.parametrize("spec", LOSSES_OF_ALL, ids=CLIENT_LOSSES)
def test_a_clients_loss_has_the_numbers_that_it_had_when_it_was_released(spec):
    batch = make_datums(20, seed=3, losses=(spec,))
    logprobs = leaf(batch)
    losses = losses_of(logprobs, batch)
    losses.sum().backward()
    moment = (logprobs.grad.double() * torch.arange(len(losses))).sum().item()
    assert (losses.detach().double().sum().item(), moment) == pytest.approx(CLIENTS[spec.name], rel=1e-5)


# -- losses that clients ask for -----------------------------------------------------------------------------------------------------------


def leaf(batch, *, seed=0):
    gaps = 0.3 * np.random.default_rng(seed).standard_normal(batch.num_targets)
    rollout = batch.columns["rollout_logprobs"]
    return torch.tensor(np.where(rollout != 0, rollout, -3) + gaps, dtype=torch.float32, requires_grad=True)


def losses_of(logprobs, batch):
    return target_losses(logprobs, batch, np.arange(batch.num_targets)).losses


def by_sequence(losses, batch):
    return torch.zeros(len(batch)).index_add(0, torch.from_numpy(batch.target_sequences), losses)


def is_masked(batch):
    return (batch.columns["loss_weights"] == 0) & (batch.columns["ratio_mask"] == 0)


@pytest.mark.parametrize("losses", [*((spec,) for spec in LOSSES_OF_ALL), LOSSES_OF_ALL], ids=[*CLIENT_LOSSES, "all at once"])
@pytest.mark.parametrize("dense", [True, False])
def test_a_clients_loss_and_its_gradient_are_those_of_the_formula(losses, dense):
    batch = make_datums(18, seed=3, losses=losses, dense=dense)
    mine, theirs = leaf(batch), leaf(batch)
    got, expected = by_sequence(losses_of(mine, batch), batch), reference(theirs, batch)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    got.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert mine.grad.any()


def test_some_targets_of_a_batch_have_the_losses_that_they_have_among_all():
    batch = make_datums(18, seed=3)
    logprobs = leaf(batch)
    index = np.flatnonzero(np.isin(batch.target_sequences, [2, 5, 11, 12]))
    assert torch.equal(target_losses(logprobs[torch.from_numpy(index)], batch, index).losses, losses_of(logprobs, batch)[index])


def test_the_clips_of_the_samples_do_act():
    batch = make_datums(18, seed=3)
    logprobs = leaf(batch)
    losses_of(logprobs, batch).sum().backward()
    for name in ("ppo", "gspo"):
        own = (batch.ids("loss_ids") == [spec.name for spec in LOSSES_OF_ALL].index(name))[batch.target_sequences]
        own &= batch.columns["advantages"] != 0
        assert 0 < np.count_nonzero(logprobs.grad.numpy()[own] == 0) < np.count_nonzero(own)


@pytest.mark.parametrize("spec", LOSSES_OF_ALL, ids=lambda spec: spec.name)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_what_a_client_masks_adds_exactly_nothing_whatever_it_holds(spec, poison):
    batch = make_datums(4, losses=(spec,), dense=True)
    masked = is_masked(batch)
    assert masked.any() and not masked.all()
    clean = leaf(batch)
    expected = losses_of(clean, batch)
    expected.sum().backward()
    own = batch.columns["rollout_logprobs"]
    for rollout in (own, np.where(masked, -poison, own)):
        poisoned = torch.where(torch.from_numpy(masked), poison, clean.detach()).requires_grad_()
        got = losses_of(poisoned, batch.with_columns(rollout_logprobs=rollout))
        assert torch.equal(got, expected) and not got[torch.from_numpy(masked)].any()
        got.sum().backward()
        assert torch.equal(poisoned.grad, clean.grad) and not poisoned.grad[torch.from_numpy(masked)].any()


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_a_policy_far_from_the_one_that_sampled_gives_finite_numbers(name):
    batch = make_datums(4, losses=(client_loss(name),), dense=True)
    for gap in (-500.0, 500.0):
        logprobs = torch.from_numpy(batch.columns["rollout_logprobs"] + np.float32(gap)).requires_grad_()
        losses = losses_of(logprobs, batch)
        losses.sum().backward()
        assert losses.isfinite().all() and logprobs.grad.isfinite().all()


def test_gspo_takes_its_mean_over_the_mask_alone_and_also_where_the_advantage_is_zero():
    spec = client_loss("gspo", clip_low=0.0, clip_high=100.0)
    batch = make_datums(1, losses=(spec,), dense=True, prompt_len=1, max_answer=2)
    batch = batch.with_columns(
        rollout_logprobs=np.array([-1.0, -1.0]), advantages=np.array([2.0, 0.0]), loss_weights=np.ones(2), ratio_mask=np.ones(2))
    losses = losses_of(torch.tensor([-1.0, -3.0]), batch)
    assert losses.tolist() == pytest.approx([-2 * np.exp(-1.0), 0.0])
    alone = losses_of(torch.tensor([-1.0, -3.0]), batch.with_columns(ratio_mask=np.array([1, 0])))
    assert alone.tolist() == pytest.approx([-2.0, 0.0])


def test_cross_entropy_is_the_weighted_negative_logprob():
    batch = make_datums(1, losses=LOSSES_OF_ALL[:1], dense=True, prompt_len=1, max_answer=2).with_columns(loss_weights=np.array([1, 0.5]))
    assert losses_of(torch.tensor([-0.5, -2.0]), batch).tolist() == [0.5, 1.0]


def test_no_targets_have_no_losses():
    for spec in (*LOSSES_OF_ALL, *PRESETS.values()):
        columns = dict.fromkeys((
            *make_datums(3).columns, "m2_mask", "detach_mask", "kl_cov_mask", "ref_logprobs", "teacher_logprobs", "teacher_least"),
            np.zeros(0))
        nothing = replace(make_datums(3, losses=LOSSES_OF_ALL[:1]).select([]), losses=(spec,), columns=columns)
        found = target_losses(torch.zeros(0, requires_grad=True), nothing, np.zeros(0, np.int64), entropy=torch.zeros(0), report=True)
        assert found.losses.shape == (0,)
        found.losses.sum().backward()


@pytest.mark.parametrize("loss", [
    *(pytest.param(policy_loss(AlgorithmConfig(preset=name)), id=name) for name in ALGORITHMS),
    *(pytest.param(loss, id=f"part-{name}") for name, loss in PRESETS.items()),
    *(pytest.param(own(name), id=f"objective-{name}") for name, row in OBJECTIVES.items() if not row.group)])
def test_a_loss_and_its_backward_pass_never_wait_for_the_device(loss):
    batch, _ = random_batch(loss)
    everything = np.arange(batch.num_targets)
    batch = batch.with_columns(**{
        name: np.ones(batch.num_targets, np.float32) for name in ("returns", "values", "imitate_mask") if name not in batch.columns})
    logprobs, entropy = (torch.zeros(batch.num_targets, device=DEVICE, requires_grad=True) for _ in range(2))
    with HostWaits() as waits:
        target_losses(logprobs, batch, everything, entropy=entropy, report=True).losses.sum().backward()
    assert waits.found == []
    assert logprobs.grad.device == DEVICE
