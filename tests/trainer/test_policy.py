"""Rows that point into the whole batch, their losses, and a model without dropout. That steps are right is tested with the engines."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import families
from family_table import FAMILIES
from offbeat.algorithms.objectives import policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.root import Config
from offbeat.config.train import TrainConfig
from offbeat.errors import ModelError
from offbeat.model.logprobs import token_logprobs
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.policy import canary_logprobs, load_policy, row_of, score_row
from ranks import run_alone
from train_samples import build_model, imitated, make_batch


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_policy(build_model(tmp_path_factory.mktemp("model")), config=TrainConfig())


def test_a_row_of_some_sequences_points_into_the_whole_batch():
    batch = make_batch(3, 2)
    families = np.array([1, 1, 0, 0, 2, 2])
    row = row_of(batch, np.array([4, 0, 3]), share_prefix=True, families=families)
    assert set(row.owner.tolist()) == {0, 3, 4}
    assert (np.diff(families[row.owner]) >= 0).all()
    assert set(batch.target_sequences[row.batch_index].tolist()) == {0, 3, 4}
    assert (batch.targets[row.batch_index] == row.target).all()


def test_sequences_that_score_nothing_make_no_row():
    batch = make_batch(2, 2)
    batch = replace(batch, positions=[], targets=[], columns={name: [] for name in batch.columns})
    assert len(row_of(batch, np.array([0, 1]), share_prefix=True)) == 0
    assert len(row_of(batch, np.array([], np.int64), share_prefix=True)) == 0


@pytest.mark.parametrize("imitates", [False, True])
def test_losses_are_those_of_the_batch_at_the_given_temperature(model, imitates):
    batch = make_batch(2, 2, loss=policy_loss(AlgorithmConfig(weight="none")))
    batch = imitated(batch) if imitates else batch
    row = row_of(batch, np.arange(4), share_prefix=True)
    scored = score_row(model, batch, row, temperature=0.7)
    expected, entropy = token_logprobs(model, row, temperature=0.7, with_entropy=True)
    assert torch.equal(scored.logprobs, expected) and not len(scored.entropy)
    assert torch.equal(score_row(model, batch, row, temperature=0.7, with_entropy=True).entropy, entropy)
    weights, advantages = (torch.from_numpy(batch.columns[name][row.batch_index]) for name in ("loss_weights", "advantages"))
    unit = -expected if imitates else -advantages
    torch.testing.assert_close(scored.losses, unit * weights)
    prox = np.zeros(batch.num_targets)
    prox[row.batch_index] = expected.detach() - 0.1
    moved = score_row(model, batch.with_columns(prox_logprobs=prox), row, temperature=0.7)
    assert torch.equal(moved.losses, scored.losses) == imitates


def test_the_canarys_log_probabilities_are_those_of_transformers(model):
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens, use_cache=False).logits, -1)[0, :-1].gather(1, tokens[0, 1:, None])
        assert canary_logprobs(model, tokens[0].tolist()) == pytest.approx(logprobs[:, 0].tolist(), abs=1e-6)


def test_a_policy_trains_without_dropout(tmp_path):
    model = load_policy(build_model(tmp_path), config=TrainConfig(gradient_checkpointing=True), dtype="bfloat16")
    assert model.training
    assert model.dtype == torch.bfloat16
    assert not [module for module in model.modules() if getattr(module, "attention_dropout", 0.0)]


def test_a_model_with_layers_that_mix_a_row_trains_without_shared_prompts_only(tmp_path):
    folder = families.build(next(family for family in FAMILIES if family.name == "Qwen3.5"), str(tmp_path)).folder
    with pytest.raises(ModelError, match=r"has linear_attention layers, .* set train.share_prefix to false"):
        load_policy(folder, config=TrainConfig())
    model = load_policy(folder, config=TrainConfig(share_prefix=False))
    batch = make_batch(3, 2)
    row = row_of(batch, np.arange(6), share_prefix=False)
    scored = score_row(model, batch, row, temperature=1.0)
    scored.losses.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ModelError, match="many adapters in one pass"):
        config = Config.model_validate({"model": {"path": folder, "lora": {"rank": 2}}, "train": {"share_prefix": False}})
        run_alone(lambda groups, _: BankTrainer.build_empty(folder, config=config, groups=groups))
