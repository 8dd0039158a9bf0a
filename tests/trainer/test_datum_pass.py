"""Datums under many adapters against plain autograd, sequence by sequence, with merged weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from datum_samples import LOSSES_OF_ALL, make_datums, reference
from offbeat.algorithms.adam import AdamParams
from offbeat.config.root import Config
from offbeat.data.datums import DatumBatch, LossSpec
from offbeat.data.packing import plan_microbatches, row_cost
from offbeat.errors import ConfigError, DataError
from offbeat.trainer.adapters import AdapterEngine
from offbeat.trainer.datum_pass import layout
from ranks import run_alone
from train_samples import build_model, make_batch

NAMES = ("alice", "bob", "carol")
FAST = AdamParams(lr=3e-2, eps=1e-12)


def build(groups, folder, *, max_tokens=1000, **train):
    config = Config.model_validate({
        "model": {"lora": {"rank": 4}}, "rollout": {"temperature": 0.7}, "train": {"max_tokens_per_microbatch": max_tokens, **train}})
    engine = AdapterEngine.build(folder, config=config, groups=groups)
    for seed, name in enumerate(NAMES):
        engine.add(name, rank=4 - seed, alpha=8.0, seed=seed)
    warm = make_datums(3, seed=99, losses=(LossSpec("cross_entropy"),), dense=True)
    engine.run_datums(warm, NAMES, learn=True)
    engine.optim_step(dict.fromkeys(NAMES, FAST))  # so that B is not zero
    return engine


def names_of(batch):
    return [NAMES[(i // 2) % 3] for i in range(len(batch))]


def gradient(engine, name):
    slot = engine._slots[name]
    return engine._bank.unpack(engine._bank.gradients[slot], slot).named_tensors()


def slow(engine, folder, batch, adapters):
    """Log-probabilities [M], losses [N], and gradients by adapter, in the names of PEFT."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    leaves, logprobs = {}, []
    for name in set(adapters):
        adapter = engine._bank.adapter(engine._slots[name])
        leaves[name] = adapter.scaling, {layer: tuple(t.requires_grad_() for t in pair) for layer, pair in adapter.pairs.items()}
    for i, name in enumerate(adapters):
        scaling, pairs = leaves[name]
        merged = {f"{layer}.weight": state[f"{layer}.weight"] + scaling * b @ a for layer, (a, b) in pairs.items()}
        low, high = batch.offsets[i : i + 2]
        tokens = torch.from_numpy(batch.tokens[low:high].astype(np.int64))[None]
        rows = log_softmax(functional_call(model, merged, (tokens,), {"use_cache": False}).logits[0], -1)
        for k in range(high - low):
            logprobs += [rows[k, target] for target in batch.targets[slice(*batch.target_offsets[low + k : low + k + 2])]]
    losses = reference(logprobs, batch)
    losses.sum().backward()
    gradients = {
        name: {f"base_model.model.{layer}.lora_{side}.weight": t.grad
               for layer, pair in pairs.items() for side, t in zip("AB", pair, strict=True)}
        for name, (_, pairs) in leaves.items()}
    return torch.stack(logprobs).detach().numpy(), losses.detach().numpy(), gradients


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("dense", [True, False])
def test_logprobs_losses_and_gradients_are_those_of_the_slow_way_for_every_loss_at_once(dense, folder):
    batch = make_datums(12, seed=5, dense=dense)
    adapters = names_of(batch)

    def check(groups, _):
        engine = build(groups, folder)
        logprobs, losses, gradients = slow(engine, folder, batch, adapters)
        for options in ({"max_tokens": 1000}, {"max_tokens": 25}, {"share_prefix": False, "gradient_checkpointing": True}):
            engine = build(groups, folder, **options)
            for times in (1, 2):
                got = engine.run_datums(batch, adapters, learn=True)
                np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-5)
                np.testing.assert_allclose(got.losses, losses, rtol=1e-5, atol=1e-5)
                for name in NAMES:
                    for key, tensor in gradient(engine, name).items():
                        torch.testing.assert_close(tensor, times * gradients[name][key], rtol=1e-4, atol=2e-5)
            silent = engine.run_datums(batch, adapters, learn=False)
            assert np.array_equal(silent.logprobs, got.logprobs) and np.array_equal(silent.losses, got.losses)

    run_alone(check)


def test_a_prompt_of_one_adapter_runs_once_and_changes_nothing():
    batch = make_datums(6, seed=2, losses=LOSSES_OF_ALL[1:], dense=True, prompt_len=9)
    batch = replace(batch, advantages=np.where(batch.ratio_mask, 1.0, 0.0))  # no sample is without a trained target
    packed = layout(batch, max_tokens=100)
    assert packed.lengths.tolist() == (batch.lengths + 1).tolist()
    shared = np.count_nonzero(np.bincount(packed.group_ids) > 1)
    assert shared and row_cost(packed, share_prefix=True) < row_cost(packed, share_prefix=False) == batch.num_tokens
    plan = plan_microbatches(packed, num_ranks=1, max_tokens=int(batch.lengths.max()), share_prefix=True)
    assert sorted(np.concatenate(plan.microbatches[0]).tolist()) == list(range(6))


def test_datums_give_the_gradients_of_a_token_batch(folder):
    """Supervised fine-tuning both ways."""
    batch = make_batch(2, 3, seed=4)
    keep = np.ones(batch.num_tokens, bool)
    keep[batch.offsets[1:] - 1] = False
    follows = np.zeros(batch.num_tokens, np.int64)
    follows[:-1] = np.arange(1, batch.num_tokens)
    weights = np.where(batch.loss_mask, batch.loss_weights, 0)[follows][keep]
    zeros = np.zeros(len(weights))
    datums = DatumBatch(
        tokens=batch.tokens[keep], offsets=batch.offsets - np.arange(len(batch) + 1), target_offsets=np.arange(len(weights) + 1),
        targets=batch.tokens[follows][keep], weights=weights, rollout_logprobs=zeros, advantages=zeros, ratio_mask=zeros,
        losses=(LossSpec("cross_entropy"),), loss_ids=np.zeros(6))
    adapters = names_of(batch)

    def check(groups, _):
        engine, other = build(groups, folder), build(groups, folder)
        got = engine.run_datums(datums, adapters, learn=True)
        parts = other.forward_backward(batch, adapters, objective_name="sft", algorithm=Config().algorithm).stats
        assert got.losses.sum() == pytest.approx(sum(part.sums["train/loss"] for part in parts.values()), rel=1e-5)
        torch.testing.assert_close(engine._bank.gradients, other._bank.gradients, rtol=1e-4, atol=1e-6)

    run_alone(check)


def test_datums_without_targets_and_batches_without_datums_are_nothing(folder):
    batch = make_datums(4, seed=1)
    bare = replace(batch, target_offsets=np.zeros(batch.num_tokens + 1), **{
        name: np.zeros(0) for name in ("targets", "weights", "rollout_logprobs", "advantages", "ratio_mask")})
    mixed = DatumBatch.concatenate([bare.select([0, 1]), batch.select([0, 1, 2, 3])])
    empty = replace(bare.select([0]), tokens=np.zeros(0), offsets=np.zeros(2), target_offsets=np.zeros(1))

    def check(groups, _):
        engine = build(groups, folder)
        for nothing in (batch.select([]), bare, empty):
            passed = engine.run_datums(nothing, ["alice"] * len(nothing), learn=True)
            assert not len(passed.logprobs) and passed.losses.tolist() == [0.0] * len(nothing)
        assert not engine._bank.gradients.any()
        alone = engine.run_datums(batch, ["alice"] * 4, learn=False)
        both = engine.run_datums(mixed, ["bob", "alice"] + ["alice"] * 4, learn=False)
        np.testing.assert_allclose(both.logprobs, alone.logprobs, atol=1e-6)
        np.testing.assert_allclose(both.losses, [0, 0, *alone.losses], atol=1e-5)

    run_alone(check)


def test_what_cannot_run_is_said_before_anything_is_computed(folder):
    batch = make_datums(4, seed=1, prompt_len=6)
    longest = int(batch.lengths.argmax())

    def check(groups, _):
        engine = build(groups, folder, max_tokens=int(batch.lengths.max()) - 1)
        for error, sentence, adapters in (
            (DataError, rf"datum {longest} has {batch.lengths.max()} tokens, which exceeds train.max_tokens_per_microbatch", ["alice"] * 4),
            (DataError, "got 1 names for 3 sequences", ["alice"]),
            (ConfigError, "there is no adapter 'dave' here", ["alice", "bob", "dave"]),
        ):
            with pytest.raises(error, match=sentence):
                part = batch if len(adapters) == 4 else batch.select([i for i in range(4) if i != longest])
                engine.run_datums(part, adapters, learn=True)
        assert not engine._bank.gradients.any()

    run_alone(check)
