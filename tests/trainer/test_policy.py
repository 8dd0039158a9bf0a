"""Rows that point into the whole batch, their losses, and a model without dropout. That steps are right is tested with the engines."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import families
from family_table import FAMILIES, SIZES
from offbeat.algorithms.objectives import policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.root import Config
from offbeat.config.train import TrainConfig
from offbeat.data.batch import RegulariserSpec
from offbeat.errors import ModelError
from offbeat.model.attention import PACKED
from offbeat.model.logprobs import token_logprobs
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.policy import canary_logprobs, load_policy, predict_logprobs, row_of, score_row
from ranks import run_alone
from train_samples import build_model, imitated, make_batch
from waits import DEVICE, HostWaits


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
    scored = score_row(model, batch, row, predict=predict_logprobs, temperature=0.7)
    expected, entropy = token_logprobs(model, row, temperature=0.7, with_entropy=True)
    assert torch.equal(scored.predictions, expected) and not scored.report.means
    reported = score_row(model, batch, row, predict=predict_logprobs, temperature=0.7, report=True).report.means
    assert torch.equal(reported["train/entropy"], entropy)
    weights, advantages = (torch.from_numpy(batch.columns[name][row.batch_index]) for name in ("loss_weights", "advantages"))
    unit = -expected if imitates else -advantages
    torch.testing.assert_close(scored.losses, unit * weights)
    prox = np.zeros(batch.num_targets)
    prox[row.batch_index] = expected.detach() - 0.1
    moved = score_row(model, batch.with_columns(prox_logprobs=prox), row, predict=predict_logprobs, temperature=0.7)
    assert torch.equal(moved.losses, scored.losses) == imitates


def test_an_entropy_term_has_the_gradient_of_a_whole_softmax(model):
    """0.3 times the entropy lowers the loss, beside the terms that other parts of the loss have."""
    plain = policy_loss(AlgorithmConfig(behave_weight="none"))
    batch = make_batch(2, 2, loss=replace(plain, regularisers=(RegulariserSpec("entropy", 0.3),)))
    row = row_of(batch, np.arange(4), share_prefix=True)
    found = []
    for loss in (batch.losses[0], plain):
        model.zero_grad()
        scored = score_row(model, replace(batch, losses=(loss,)), row, predict=predict_logprobs, temperature=0.7)
        scored.losses.sum().backward()
        found.append((scored.losses.sum(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])))
    model.zero_grad()
    bonus = torch.zeros(())
    for number in range(4):
        one = batch.select([number])
        logits = model(torch.from_numpy(one.tokens.astype(np.int64))[None], use_cache=False).logits[0, one.positions] / 0.7
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        bonus = bonus + 0.3 * (entropy * torch.from_numpy(one.columns["loss_weights"])).sum()
    bonus.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(found[1][0] - found[0][0], bonus)
    torch.testing.assert_close(found[1][1] - found[0][1], expected, rtol=1e-4, atol=1e-6)


def test_the_canarys_log_probabilities_are_those_of_transformers(model):
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens, use_cache=False).logits, -1)[0, :-1].gather(1, tokens[0, 1:, None])
        assert canary_logprobs(model, tokens[0].tolist()) == pytest.approx(logprobs[:, 0].tolist(), abs=1e-6)


def test_a_policy_trains_without_dropout(tmp_path):
    model = load_policy(build_model(tmp_path), config=TrainConfig(gradient_checkpointing="full"), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert not [module for module in model.modules() if getattr(module, "attention_dropout", 0.0)]


def count_layer_calls(model):
    """A list that grows by one with each call of a decoder layer's attention."""
    calls = []
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(("name", "noise"), [
    ("Mixtral", {"router_jitter_noise": 0.4}), ("Phi-3.5 MoE", {"router_jitter_noise": 0.4, "input_jitter_noise": 0.4})])
def test_checkpointed_gradients_leave_routing_as_engines_do_it(tmp_path, name, noise):
    """Jitter and random routing belong to pretraining: an engine has neither, and a layer that is computed twice would differ."""
    family = next(family for family in FAMILIES if family.name == name)
    folder = families.build(replace(family, settings={**family.settings, **noise}), str(tmp_path)).folder
    batch = make_batch(3, 2, seed=2)
    row = row_of(batch, np.arange(6), share_prefix=False)
    found, calls = [], []
    for checkpointing in ("off", "full"):
        model = load_policy(folder, config=TrainConfig(share_prefix=False, gradient_checkpointing=checkpointing))
        counted = count_layer_calls(model)
        logprobs = token_logprobs(model, row)
        logprobs.sum().backward()
        found.append([logprobs, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])
        calls.append(len(counted))
    assert calls[1] == 2 * calls[0], "activations are computed again"
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(checkpointed, plain)


def test_a_model_with_layers_that_mix_a_row_trains_without_shared_prompts_only(tmp_path):
    folder = families.build(next(family for family in FAMILIES if family.name == "Qwen3.5"), str(tmp_path)).folder
    with pytest.raises(ModelError, match=r"has linear_attention layers, .* set train.share_prefix to false"):
        load_policy(folder, config=TrainConfig())
    model = load_policy(folder, config=TrainConfig(share_prefix=False))
    batch = make_batch(3, 2)
    row = row_of(batch, np.arange(6), share_prefix=False)
    scored = score_row(model, batch, row, predict=predict_logprobs, temperature=1.0)
    scored.losses.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ModelError, match="many adapters in one pass"):
        config = Config.model_validate({"model": {"path": folder, "lora": {"rank": 2}}, "train": {"share_prefix": False}})
        run_alone(lambda groups, _: BankTrainer.build_empty(folder, config=config.for_ranks, groups=groups))


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("with_kernel", [True, False])
def test_a_micro_batch_never_waits_for_the_device(kind, with_kernel):
    """The kernel for sequences of many lengths stands for itself on fake tensors; without it buckets of like lengths are computed."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shape = SIZES | {"sliding_window": 4} | (experts if "moe" in kind else {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape), attn_implementation=PACKED, dtype=torch.bfloat16)
    batch = make_batch(3, 2, loss=policy_loss(AlgorithmConfig(preset="gspo")))
    row = row_of(batch, np.array([4, 0, 3]), share_prefix=True)
    with FakeTensorMode(allow_non_fake_inputs=True) if with_kernel else nullcontext():
        model.to_empty(device=DEVICE).tie_weights()
        with HostWaits() as waits:
            score_row(model, batch, row, predict=predict_logprobs, temperature=0.7, report=True).losses.sum().backward()
    assert waits.found == []
