"""The trainer of a value model: it learns what its batches say, on any number of ranks, and goes on from a checkpoint."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from offbeat.config.root import Config
from offbeat.config.train import OptimizerConfig
from offbeat.data.batch import LossSpec
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.strategies import whole_tensor
from offbeat.trainer.value_trainer import ValueTrainer
from ranks import run_alone, run_ranks
from train_samples import MESHES, arranged, build_model, configure, make_batch, own_share, score, take_step, train, train_and_resume

VALUE = LossSpec("value", {"clip": 0.0})
OPTIMIZER = OptimizerConfig(lr=1e-2)


def returning(batch, seed=3):
    rng = np.random.default_rng(seed)
    return replace(batch, losses=(VALUE,)).with_columns(
        returns=rng.standard_normal(batch.num_targets), values=np.zeros(batch.num_targets))


BATCH = returning(make_batch(3, 2))


def _steps(trainer, count):
    part, micros = own_share(trainer, BATCH)
    return [take_step(trainer, part, [micros], optimizer=OPTIMIZER) for _ in range(count)]


def _train(groups, folder):
    return {
        mesh: train_and_resume(ValueTrainer, groups, folder, mesh, _steps, num_steps=3)[1] for mesh in MESHES[groups.world]}


@pytest.mark.drill
def test_it_learns_the_same_on_any_number_of_ranks_and_resumes_exactly(tmp_path):
    folder = build_model(tmp_path / "model")
    alone = run_alone(_train, argument=folder)
    returns, weights = BATCH.columns["returns"].astype(np.float64), BATCH.columns["loss_weights"].astype(np.float64)
    first = alone["ddp"][0]
    assert first["train/loss"] == pytest.approx((returns**2 / 2 * weights).sum(), abs=1e-6), "values begin at 0"
    assert first["critic/return_mean"] == pytest.approx(returns.mean(), abs=1e-6)
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert alone["ddp"][2]["train/loss"] < first["train/loss"] and alone["ddp"][2]["critic/explained_variance"] > 0
    assert not any(name.startswith("policy/") or name == "train/entropy" for name in first)
    for both in run_ranks(_train, world=2, argument=folder):
        for mesh, steps in both.items():
            for one, other in zip(alone["ddp"], steps, strict=True):
                assert other == pytest.approx(one, abs=2e-4), mesh


def test_it_scores_values(tmp_path):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        trainer = ValueTrainer.build(folder, config=configure(folder), groups=groups)
        _steps(trainer, 2)
        whole, small = score(trainer, BATCH, max_tokens=10_000), score(trainer, BATCH, max_tokens=20)
        assert list(whole) == ["values"] and whole["values"].any()
        np.testing.assert_allclose(small["values"], whole["values"], atol=1e-5)
        assert list(score(trainer, BATCH, with_entropy=True)) == ["values"], "values have no entropy"

    run_alone(check)


def _normalised(groups, folder):
    """Losses, explained variance and values around steps in moving units, on rewards of a hundred."""
    config = Config.model_validate({
        "model": {"path": folder}, "algorithm": {"preset": "ppo"}, "critic": {"normalise": True, "value_clip": 0}})
    trainer = ValueTrainer.build_critic(folder, config=config.for_ranks, groups=groups, policy=None)
    large = BATCH.with_columns(returns=100 + 50 * BATCH.columns["returns"])
    part, micros = own_share(trainer, large)
    before = score(trainer, large)["values"]
    trainer._normalised(part)
    moved = float(np.abs(score(trainer, large)["values"] - before).max())
    return moved, [take_step(trainer, part, [micros], optimizer=OPTIMIZER) for _ in range(8)]


def test_units_that_follow_the_returns_change_no_value_and_let_a_critic_learn_large_rewards(tmp_path):
    moved, steps = run_alone(_normalised, argument=build_model(tmp_path / "model"))
    assert moved < 1e-3
    returns = 100 + 50 * BATCH.columns["returns"].astype(np.float64)
    scaled = np.square(returns) / returns.var() / 2
    assert steps[0]["train/loss"] == pytest.approx((scaled * BATCH.columns["loss_weights"]).sum(), rel=1e-3)
    assert steps[-1]["train/loss"] < 0.5 * steps[0]["train/loss"] and steps[-1]["critic/value_mean"] > 30


def _adopt(groups, folder):
    for mesh in MESHES[groups.world]:
        config, there = configure(folder), arranged(groups, mesh)
        policy = ModelTrainer.build(folder, config=config.for_ranks, groups=there)
        critic = ValueTrainer.build_critic(folder, config=config.for_ranks, groups=there, policy=policy)
        train(policy, [make_batch(3, 2)])
        _steps(critic, 1)
        critic.restart_optimizer()
        policy.restart_optimizer()
        theirs, own = policy.model.state_dict(), critic.model.state_dict()
        same = [name for name in own if name in theirs and "lm_head" not in name]
        assert len(same) > 10 and all(torch.equal(whole_tensor(own[name]), whole_tensor(theirs[name])) for name in same)
        assert score(critic, BATCH)["values"].any(), "its head stays"
        _steps(critic, 1)
        assert not torch.equal(whole_tensor(critic.model.state_dict()[same[0]]), whole_tensor(policy.model.state_dict()[same[0]]))


@pytest.mark.drill
def test_a_critic_begins_with_what_a_warm_up_has_taught_the_policy_and_goes_its_own_way_then(tmp_path):
    run_ranks(_adopt, world=2, argument=build_model(tmp_path / "model"))
