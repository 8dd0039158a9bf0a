"""Passes over any targets and losses under many adapters, against plain autograd, sequence by sequence, with merged weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from datum_samples import LOSSES_OF_ALL, make_datums, of_adapters, reference
from offbeat.algorithms.adam import AdamParams
from offbeat.algorithms.objectives import CROSS_ENTROPY
from offbeat.data.batch import Batch
from offbeat.data.packing import find_prompts, pack_row, plan_microbatches
from offbeat.errors import ConfigError, DataError
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.messages import NewAdapter, OptimStep
from ranks import run_alone
from train_samples import build_model, build_trainer, configure

NAMES = ("alice", "bob", "carol")
FAST = AdamParams(lr=3e-2, eps=1e-12)


def build(groups, folder, *, max_tokens=1000, **train):
    config = configure(folder, lora={"rank": 4}, temperature=0.7, max_tokens_per_microbatch=max_tokens, **train)
    trainer = BankTrainer.build_empty(folder, config=config.for_ranks, groups=groups)
    for seed, name in enumerate(NAMES):
        trainer.add(NewAdapter(name, 4 - seed, 8.0, seed, ("attn", "mlp")))
    trainer.forward_backward(of_adapters(make_datums(3, seed=99, losses=(CROSS_ENTROPY,), dense=True), NAMES))
    trainer.optim_step(OptimStep(dict.fromkeys(NAMES, FAST)))  # so that B is not zero
    return trainer


def of_all(batch):
    """The batch under the three adapters in turn, and their names."""
    names = [NAMES[(i // 2) % 3] for i in range(len(batch))]
    return of_adapters(batch, names), names


def gradient(trainer, name):
    slot = trainer._slots[name]
    return trainer._bank.unpack(trainer._bank.gradients[slot], slot).named_tensors()


def slow(trainer, folder, batch, adapters):
    """Log-probabilities [M], losses [N], and gradients by adapter, in the names of PEFT."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    leaves, logprobs = {}, []
    for name in set(adapters):
        adapter = trainer._bank.adapter(trainer._slots[name])
        leaves[name] = adapter.scaling, {layer: tuple(t.requires_grad_() for t in pair) for layer, pair in adapter.pairs.items()}
    for i, name in enumerate(adapters):
        scaling, pairs = leaves[name]
        merged = {f"{layer}.weight": state[f"{layer}.weight"] + scaling * b @ a for layer, (a, b) in pairs.items()}
        low, high = batch.offsets[i : i + 2]
        tokens = torch.from_numpy(batch.tokens[low:high].astype(np.int64))[None]
        rows = log_softmax(functional_call(model, merged, (tokens,), {"use_cache": False}).logits[0], -1)
        for m in np.flatnonzero(batch.target_sequences == i):
            logprobs.append(rows[batch.positions[m] - low, batch.targets[m]])
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
    batch, adapters = of_all(make_datums(12, seed=5, dense=dense))

    def check(groups, _):
        trainer = build(groups, folder)
        logprobs, losses, gradients = slow(trainer, folder, batch, adapters)
        for options in ({"max_tokens": 1000}, {"max_tokens": 25}, {"share_prefix": False, "gradient_checkpointing": "full"}):
            trainer = build(groups, folder, **options)
            for times in (1, 2):
                got = trainer.forward_backward(batch)
                np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-5)
                np.testing.assert_allclose(got.losses, losses, rtol=1e-5, atol=1e-5)
                for name in NAMES:
                    for key, tensor in gradient(trainer, name).items():
                        torch.testing.assert_close(tensor, times * gradients[name][key], rtol=1e-4, atol=2e-5)
            silent = trainer.forward(batch)
            assert np.array_equal(silent.logprobs, got.logprobs) and np.array_equal(silent.losses, got.losses)

    run_alone(check)


def test_a_whole_model_has_the_losses_and_logprobs_of_the_slow_way(folder):
    batch = make_datums(12, seed=5)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    logprobs = []
    for i in range(len(batch)):
        one = batch.select([i])
        rows = log_softmax(model(torch.from_numpy(one.tokens.astype(np.int64))[None], use_cache=False).logits[0], -1)
        logprobs += list(rows[one.positions, one.targets])
    losses = reference(logprobs, batch).detach()

    def check(groups, _):
        for tokens in (1000, 25):
            got = build_trainer(groups, folder, max_tokens_per_microbatch=tokens).forward_backward(batch)
            np.testing.assert_allclose(got.logprobs, torch.stack(logprobs).detach(), atol=1e-5)
            np.testing.assert_allclose(got.losses, losses, rtol=1e-5, atol=1e-5)

    run_alone(check)


def test_a_prompt_of_one_adapter_runs_once_and_changes_nothing():
    batch = make_datums(6, seed=2, losses=LOSSES_OF_ALL[1:], dense=True, prompt_len=9)
    mask = batch.columns["ratio_mask"]
    packed = find_prompts(batch.with_columns(advantages=mask, loss_weights=mask))  # no sample is without a trained target
    shared = np.count_nonzero(np.bincount(packed.group_ids) > 1)
    rows = [pack_row(packed, share_prefix=share) for share in (True, False)]
    assert shared and len(rows[0]) < len(rows[1]) == batch.num_tokens
    plan = plan_microbatches(packed, num_ranks=1, max_tokens=int(batch.lengths.max()), share_prefix=True)
    assert sorted(np.concatenate(plan.microbatches[0]).tolist()) == list(range(6))


def test_datums_without_targets_and_batches_without_datums_are_nothing(folder):
    batch = make_datums(4, seed=1)
    bare = replace(batch, positions=[], targets=[], columns={name: [] for name in batch.columns})
    mixed = Batch.concatenate([bare.select([0, 1]), batch])
    empty = replace(bare.select([0]), tokens=[], offsets=[0, 0])

    def check(groups, _):
        trainer = build(groups, folder)
        for nothing in (batch.select([]), bare, empty):
            scores = trainer.forward_backward(of_adapters(nothing, ["alice"] * len(nothing)) if len(nothing) else of_all(nothing)[0])
            assert not len(scores.logprobs) and scores.losses.tolist() == [0.0] * len(nothing)
        assert not trainer._bank.gradients.any()
        alone = trainer.forward(of_adapters(batch, ["alice"] * 4))
        both = trainer.forward(of_adapters(mixed, ["bob", "alice"] + ["alice"] * 4))
        np.testing.assert_allclose(both.logprobs, alone.logprobs, atol=1e-6)
        np.testing.assert_allclose(both.losses, [0, 0, *alone.losses], atol=1e-5)

    run_alone(check)


def test_what_cannot_run_is_said_before_anything_is_computed(folder):
    batch = make_datums(4, seed=1, prompt_len=6, dense=True)
    longest = int(batch.lengths.argmax())

    def check(groups, _):
        trainer = build(groups, folder, max_tokens=int(batch.lengths.max()) - 1)
        for error, sentence, part, names in (
            (DataError, rf"sequence {longest} of {batch.lengths.max()} tokens .* exceeds train.max_tokens_per_microbatch", batch, "aaaa"),
            (ConfigError, "there is no adapter 'd'", batch.select([i for i in range(4) if i != longest]), "abd"),
        ):
            own = of_adapters(part, [{"a": "alice", "b": "bob"}.get(name, name) for name in names])
            with pytest.raises(error, match=sentence):
                trainer.forward_backward(own)
        assert not trainer._bank.gradients.any()

    run_alone(check)
