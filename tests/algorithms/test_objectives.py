"""Losses are chosen by name, with constants of their own, and say what they read."""

import subprocess
import sys

import numpy as np
import pytest

from offbeat.algorithms.objectives import CLIENT_LOSSES, CROSS_ENTROPY, client_loss, policy_loss, reads_of
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.objectives import objective_of
from offbeat.data import wire
from offbeat.data.batch import Batch, FilterSpec, LossSpec, RegulariserSpec, WeightSpec
from offbeat.errors import ConfigError, DataError

RULE = FilterSpec("k3", "sequence", "max", low=-1e9, high=2.0)


def test_the_default_loss_is_decoupled_ppo() -> None:
    loss = LossSpec(
        "ppo", {"clip_low": 0.8, "clip_high": 1.2, "dual_clip": 0.0}, anchor="prox", weight=WeightSpec("mask", "token", 0.0, 5.0),
        own_samples=True)
    assert policy_loss(AlgorithmConfig()) == loss
    assert policy_loss(AlgorithmConfig(weight="none")).weight is None
    assert policy_loss(AlgorithmConfig(weight="clamp", weight_level="geometric", weight_low=0.5, weight_high=2.0)).weight == WeightSpec(
        "clamp", "geometric", 0.5, 2.0)


@pytest.mark.parametrize(("settings", "constants"), [
    ({"clip_low": 0.25, "clip_high": 0.5, "dual_clip": 3.0}, {"clip_low": 0.75, "clip_high": 1.5, "dual_clip": 3.0}),
    ({"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0}, {"clip_low": 0.0, "clip_high": 5.0}),
    ({"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, {"clip_low": 1 - 3e-4, "clip_high": 1 + 4e-4}),
    ({"objective": "gmpo", "clip_low": 0.4, "clip_high": 0.3}, {"clip_low": 0.4, "clip_high": 0.3}),
    ({"objective": "dppo", "constants": {"divergence": "kl"}}, {"clip_low": 0.2, "clip_high": 0.2, "divergence": "kl"}),
    ({"objective": "sapo", "constants": {"tau_low": 2.0}}, {"tau_low": 2.0, "tau_high": 1.0}),
    ({"objective": "reinforce"}, {}),
])
def test_clips_are_bounds_of_a_ratio_or_distances_and_other_constants_have_defaults(settings, constants) -> None:
    assert policy_loss(AlgorithmConfig(**settings)).constants == constants


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"objective": "sapo", "constants": {"tau": 1.0}}, "algorithm.constants of sapo has no 'tau'; it has tau_low, tau_high"),
    ({"constants": {"clip_low": 0.7}}, "algorithm.constants of ppo has no 'clip_low'; it has none"),
    ({"objective": "sapo", "constants": {"tau_low": 0.0}}, "tau_low of the objective sapo must be a finite number of at least 1e-06"),
    ({"objective": "sapo", "constants": {"tau_low": "hot"}}, "must be a finite number of at least 1e-06, got 'hot'"),
    ({"objective": "dppo", "constants": {"divergence": "js"}}, "divergence of the objective dppo must be one of tv, kl, got 'js'"),
])
def test_constants_that_an_objective_does_not_have_are_refused(settings, sentence) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_loss(AlgorithmConfig(**settings))
    assert sentence in str(caught.value)


def test_filters_and_regularisers_become_part_of_the_loss() -> None:
    loss = policy_loss(AlgorithmConfig(
        filters=({"metric": "k3", "level": "sequence", "aggregate": "max", "high": 2.0},), kl_loss="ratio_k3",
        kl_coefficient=0.1, entropy_coefficient=0.01, drift_coefficient=1e-3))
    assert loss.filters == (RULE,)
    assert loss.regularisers == (RegulariserSpec("ratio_k3", 0.1), RegulariserSpec("entropy", 0.01), RegulariserSpec("drift", 1e-3))


@pytest.mark.parametrize(("loss", "reads"), [
    (CROSS_ENTROPY, ()),
    (client_loss("ppo"), ("rollout_logprobs", "advantages")),
    (client_loss("gspo"), ("rollout_logprobs", "advantages", "ratio_mask")),
    (policy_loss(AlgorithmConfig()), ("prox_logprobs", "advantages", "rollout_logprobs")),
    (policy_loss(AlgorithmConfig(weight="none", objective="gspo")), ("prox_logprobs", "advantages", "rollout_logprobs")),
    (policy_loss(AlgorithmConfig(weight="none", anchor="rollout")), ("rollout_logprobs", "advantages")),
    (policy_loss(AlgorithmConfig(weight="none", objective="reinforce")), ("advantages", "rollout_logprobs")),
    (policy_loss(AlgorithmConfig(weight="none", objective="reinforce", kl_loss="ratio_k3")),
     ("prox_logprobs", "advantages", "rollout_logprobs", "ref_logprobs")),
    (LossSpec("importance_sampling", filters=(FilterSpec("m2", high=0.04),)),
     ("rollout_logprobs", "advantages", "prox_logprobs", "m2_mask")),
    (LossSpec("importance_sampling", filters=(FilterSpec("opsm", high=0.04),)), ("rollout_logprobs", "advantages")),
    (LossSpec("reinforce", regularisers=(RegulariserSpec("entropy", 1.0), RegulariserSpec("drift", 1.0))),
     ("advantages", "rollout_logprobs", "entropy")),
    (policy_loss(AlgorithmConfig(weight="none", cov_control="clip")), ("prox_logprobs", "advantages", "rollout_logprobs", "detach_mask")),
    (policy_loss(AlgorithmConfig(weight="none", anchor="rollout", objective="importance_sampling", cov_control="kl")),
     ("rollout_logprobs", "advantages", "prox_logprobs", "kl_cov_mask")),
    (policy_loss(AlgorithmConfig(weight="none", objective="a.py:f", objective_reads=("reference", "entropy"))),
     ("prox_logprobs", "advantages", "rollout_logprobs", "ref_logprobs", "entropy")),
])
def test_a_loss_reads_what_its_parts_read(loss, reads) -> None:
    assert sorted(reads_of(loss)) == sorted(reads)


def test_a_clients_loss_has_its_own_defaults_and_takes_only_its_own_constants() -> None:
    assert client_loss("ppo") == LossSpec("ppo", {"clip_low": 0.8, "clip_high": 1.2})
    assert client_loss("cispo") == LossSpec("cispo", {"clip_low": 0.0, "clip_high": 4.0})
    assert client_loss("dro") == LossSpec("dro", {"beta": 0.05})
    assert client_loss("gspo", clip_high=1.5) == LossSpec("gspo", {"clip_low": 0.8, "clip_high": 1.5})
    assert client_loss("cross_entropy") == CROSS_ENTROPY
    assert all(not client_loss(name).own_samples for name in CLIENT_LOSSES)


@pytest.mark.parametrize(("name", "constants", "sentence"), [
    ("grpo", {}, "there is no loss 'grpo'; use one of ppo, gspo, cispo, importance_sampling, cross_entropy, dro"),
    ("sapo", {}, "there is no loss 'sapo'"),
    ("ppo", {"beta": 1.0}, "the loss ppo has no constant 'beta'; it has clip_low, clip_high"),
    ("ppo", {"dual_clip": 3.0}, "the loss ppo has no constant 'dual_clip'"),
    ("cross_entropy", {"beta": 1.0}, "it has none"),
    ("ppo", {"clip_low": 1.3}, "the bounds of the ratio in ppo must be finite with 0 <= low <= high, got 1.3 and 1.2"),
    ("cispo", {"clip_high": np.inf}, "must be finite"),
    ("dro", {"beta": -1.0}, "beta of dro must be finite and at least 0, got -1.0")])
def test_other_losses_and_constants_are_refused(name, constants, sentence) -> None:
    with pytest.raises(DataError) as caught:
        client_loss(name, **constants)
    assert sentence in str(caught.value)


def test_an_own_objective_is_named_by_its_whole_path_and_gets_all_constants(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    loss = policy_loss(AlgorithmConfig(objective="sub/a.py:f", constants={"x": 1.0, "how": "much"}))
    assert (loss.name, loss.constants) == (f"{tmp_path}/sub/a.py:f", {"x": 1.0, "how": "much"})
    assert policy_loss(AlgorithmConfig(objective="package.module:f")).name == "package.module:f"
    assert objective_of(loss.name).by_sequence


def test_constants_that_an_objective_does_not_know_are_for_the_credit_if_that_is_a_function() -> None:
    with pytest.raises(ConfigError, match="algorithm.constants of sapo has no 'decay'; it has tau_low, tau_high"):
        policy_loss(AlgorithmConfig(objective="sapo", constants={"decay": 0.5}))
    loss = policy_loss(AlgorithmConfig(objective="sapo", constants={"decay": 0.5, "tau_low": 2.0}, credit="a.py:f"))
    assert loss.constants == {"tau_low": 2.0, "tau_high": 1.0}


def test_a_loss_with_all_of_its_parts_crosses_processes() -> None:
    loss = LossSpec(
        "dppo", {"clip_low": 0.2, "clip_high": 0.2, "divergence": "kl"}, anchor="prox", weight=WeightSpec("ratio", high=np.inf),
        filters=(RULE, FilterSpec("m2", high=0.04)), regularisers=(RegulariserSpec("entropy", 0.1),), own_samples=True)
    batch = Batch.of_next_tokens(np.zeros(2, np.int32), np.arange(2) > 0, lengths=[2], columns={"loss_weights": np.ones(2)}, losses=(
        loss, CROSS_ENTROPY))
    assert wire.decode(Batch, wire.encode(batch)).losses == (loss, CROSS_ENTROPY)
    joined = Batch.concatenate([batch, batch])
    assert joined.losses == (loss, CROSS_ENTROPY)


def test_losses_can_be_chosen_without_torch() -> None:
    code = "import sys, offbeat.algorithms.objectives, offbeat.algorithms.selection; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
