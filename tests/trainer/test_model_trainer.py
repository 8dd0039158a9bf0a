"""A whole model's step: the same numbers on one process, on two with DDP, FSDP2 or sliced tensors, and as computed otherwise."""

import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from named_bytes import named_bytes
from offbeat.algorithms.adam import AdamParams, learning_rate
from offbeat.algorithms.objectives import policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.root import Config
from offbeat.config.train import OptimizerConfig
from offbeat.data.batch import Batch, FilterSpec, LossSpec, RegulariserSpec
from offbeat.errors import ConfigError, DivergedError, StorageError
from offbeat.model.fingerprint import fingerprint
from offbeat.model.load import load_causal_lm
from offbeat.sync.platform import current_platform
from offbeat.trainer.messages import Folder, OptimStep, WriteRequest
from ranks import run_alone, run_ranks
from train_samples import (
    MESHES,
    OPTIMIZER,
    build_model,
    build_trainer,
    imitated,
    make_batch,
    own_share,
    share,
    take_step,
    temporary_model,
    train,
)

COMPOSED = LossSpec(
    "gmpo", {"clip_low": 0.02, "clip_high": 0.02}, anchor="rollout", own_samples=True,
    filters=(FilterSpec("opsm", high=0.05), FilterSpec("k2", "sequence", "max", high=0.05)),
    regularisers=(RegulariserSpec("entropy", 0.1), RegulariserSpec("ratio_k3", 0.1), RegulariserSpec("drift", 0.1)))
# name -> groups, samples per group, tokens per micro-batch. On two ranks one sequence leaves one of them empty.
CASES = {"many": (3, 4, 64), "small_budget": (3, 4, 14), "three_sequences": (3, 1, 64), "one_sequence": (1, 1, 64)}


def batches_of(case):
    num_groups, group_size, _ = CASES[case]
    return [make_batch(num_groups, group_size, seed=seed) for seed in range(3)]


def fingerprint_of(trainer, dtype="float32"):
    """That of the published weights on rank 0, else ""."""
    snapshot = trainer.snapshot(dtype)
    return snapshot.fingerprint() if trainer.groups.rank == 0 else ""


def _compare(groups, meshes):
    return {mesh: _compare_one(groups, mesh) for mesh in meshes}


def _compare_one(groups, mesh):
    """Everything that must not depend on the number of ranks, of one mesh."""
    with temporary_model() as folder:
        result = {}
        for case, (_, _, max_tokens) in CASES.items():
            trainer = build_trainer(groups, folder, mesh=mesh)
            result[case] = train(trainer, batches_of(case), max_tokens=max_tokens)
        batch = make_batch(2, 3, seed=9)
        minibatched = build_trainer(groups, folder, mesh=mesh)
        parts = [own_share(minibatched, batch.select(half)) for half in (np.arange(3), np.arange(3, 6))]
        mine = Batch.concatenate([part for part, _ in parts])
        shifted = [parts[0][1], [indices + len(parts[0][0]) for indices in parts[1][1]]]
        result["minibatches"] = take_step(minibatched, mine, shifted)
        composed = build_trainer(groups, folder, mesh=mesh)
        for number in range(2):
            whole = make_batch(3, 2, seed=number, loss=COMPOSED)
            whole = whole.with_columns(ref_logprobs=whole.columns["rollout_logprobs"] - 0.1)
            part, micros = own_share(composed, whole, max_tokens=20)
            result[f"composed_{number}"] = take_step(composed, part, [micros])
        result["checkpointed"] = train(build_trainer(groups, folder, gradient_checkpointing="full", mesh=mesh), batches_of("many"))
        mixed = build_trainer(groups, folder, precision="bf16_mixed", mesh=mesh)
        result["mixed"] = train(mixed, batches_of("small_budget"), max_tokens=14)
        result["canary"] = trainer.canary([3, 4, 5, 6, 7])
        # After scoring, a step must still see the updated weights.
        result["after_canary"] = train(trainer, [make_batch(2, 2)])
        result["fingerprint"] = fingerprint_of(trainer)
        state = trainer.snapshot("float32").state
        result["norm"] = sum(tensor.double().pow(2).sum().item() for tensor in state.values())
        result["names"] = list(state)
        if groups.world > 1:
            result["poisoned"] = _poison(build_trainer(groups, folder, mesh=mesh))
        return result


def _poison(trainer):
    """A loss that is not finite, in the share of rank 1 only."""
    part, micros = own_share(trainer, make_batch(2, 2))
    before = trainer.canary([3, 4, 5])
    if trainer.groups.batch_index == trainer.groups.batch_ranks - 1:
        part.columns["loss_weights"][0] = np.nan
    skipped = take_step(trainer, part, [micros])["train/skipped_steps"]
    unchanged = trainer.canary([3, 4, 5]) == before
    loss = train(trainer, [make_batch(2, 2)])[0][0]
    return {
        "skipped": skipped, "unchanged": unchanged, "next_is_finite": math.isfinite(loss),
        "next_changes": trainer.canary([3, 4, 5]) != before, "step": trainer.step}


@pytest.fixture(scope="module")
def alone():
    return run_alone(_compare, argument=["ddp"])["ddp"]


@pytest.fixture(scope="module")
def pair():
    return run_ranks(_compare, world=2, argument=list(MESHES[2]))


@pytest.mark.drill
@pytest.mark.parametrize("mesh", MESHES[2])
def test_two_ranks_compute_what_one_does(alone, pair, mesh):
    first, second = (rank[mesh] for rank in pair)
    for case in [*CASES, "after_canary"]:
        assert first[case] == second[case]
        np.testing.assert_allclose(first[case], alone[case], rtol=1e-5, atol=1e-5, err_msg=case)
    for case in ("minibatches", "composed_0", "composed_1"):
        assert first[case] == second[case]
        assert first[case] == pytest.approx(alone[case], rel=1e-5, abs=1e-5)
    assert alone["composed_0"]["policy/opsm_masked_fraction"] > 0 and alone["composed_0"]["policy/k2_masked_fraction"] > 0
    assert first["canary"] == second["canary"] == pytest.approx(alone["canary"], abs=1e-5)
    assert first["norm"] == pytest.approx(alone["norm"], rel=1e-5)
    assert first["names"] == alone["names"]
    assert second["names"] == []
    assert second["fingerprint"] == ""


def _one_sequence_at_a_time(folder, batches, config):
    """Losses and gradient norms of decoupled PPO steps, computed by plain transformers and torch, token by token."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay}
    vectors = {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, vectors], betas=(0.9, 0.95), foreach=False)
    results = []
    for step, batch in enumerate(batches):
        total = torch.zeros((), dtype=torch.float64)
        for low, high in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            tokens = torch.from_numpy(batch.tokens[low:high].astype(np.int64))
            logprobs = log_softmax(model(tokens[None], use_cache=False).logits[0, :-1].double(), dim=-1)
            for m in np.flatnonzero((batch.positions >= low) & (batch.positions < high)):
                rollout, advantage, loss_weight = (
                    float(batch.columns[name][m]) for name in ("rollout_logprobs", "advantages", "loss_weights"))
                current = logprobs[batch.positions[m] - low, batch.targets[m]]
                weight = math.exp(current.item() - rollout)
                weight = weight if weight <= config.weight_high else 0.0
                # With one update per batch the ratio to the proximal policy is 1 and never clipped.
                ratio = torch.exp(current - current.detach())
                total = total - ratio * advantage * weight * loss_weight
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config=OPTIMIZER, total_steps=10)
        optimizer.step()
        results.append([total.item(), norm.item()])
    return results


def test_steps_equal_an_independent_computation(alone, tmp_path):
    config = AlgorithmConfig(weight_high=1.3)
    folder = build_model(tmp_path / "model")
    batches = batches_of("many")
    capped = [replace(batch, losses=(policy_loss(config),)) for batch in batches]
    results = run_alone(lambda groups, _: train(build_trainer(groups, folder), capped))
    np.testing.assert_allclose(results, _one_sequence_at_a_time(folder, batches, config), rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(alone["many"], _one_sequence_at_a_time(folder, batches, AlgorithmConfig()), rtol=2e-5, atol=1e-5)


def test_sharing_prefixes_and_smaller_microbatches_change_nothing(tmp_path):
    folder = build_model(tmp_path / "model")
    batches = batches_of("many")

    def check(groups, _):
        expected = train(build_trainer(groups, folder), batches, max_tokens=1000)
        for max_tokens, share_prefix in ((1000, False), (30, True), (13, True), (13, False)):
            trainer = build_trainer(groups, folder, share_prefix=share_prefix)
            np.testing.assert_allclose(
                train(trainer, batches, max_tokens=max_tokens, share_prefix=share_prefix), expected, rtol=1e-5, atol=1e-5)

    run_alone(check)


@pytest.mark.drill
@pytest.mark.parametrize("mesh", MESHES[2])
def test_checkpointed_activations_change_nothing_and_bfloat16_little(alone, pair, mesh):
    for result in (alone, pair[0][mesh]):
        np.testing.assert_allclose(result["checkpointed"], result["many"], rtol=1e-6)
        np.testing.assert_allclose(result["mixed"], result["small_budget"], rtol=2e-2, atol=2e-3)


def test_supervised_steps_lower_the_cross_entropy(tmp_path):
    folder = build_model(tmp_path / "model")
    batch = imitated(make_batch(4, 2))

    def check(groups, _):
        trainer = build_trainer(groups, folder)
        losses = [loss for loss, _ in train(trainer, [batch] * 12, optimizer=OptimizerConfig(lr=1e-2))]
        scores = trainer.forward(batch)
        part, micros = share(batch, rank=0, world=1)
        metrics = take_step(trainer, part, [micros])
        assert metrics["train/loss"] == pytest.approx(-(scores.logprobs * batch.columns["loss_weights"]).sum(), abs=1e-6)
        assert metrics["train/loss"] == pytest.approx(scores.losses.sum(), abs=1e-6)
        assert not [name for name in metrics if name.startswith("policy/")]
        return losses

    losses = run_alone(check)
    assert losses[0] == pytest.approx(math.log(23), abs=0.3)
    assert losses[-1] < 0.7 * losses[0]


def test_logprobs_are_those_of_each_sequence_alone_at_the_sampling_temperature(tmp_path):
    folder = build_model(tmp_path / "model")
    batch = make_batch(3, 2)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    scores = run_alone(lambda groups, _: build_trainer(groups, folder, temperature=0.7, max_tokens_per_microbatch=14).forward(batch))
    for i in range(len(batch)):
        one = batch.select([i])
        with torch.no_grad():
            rows = log_softmax(model(torch.from_numpy(one.tokens.astype(np.int64))[None]).logits[0] / 0.7, dim=-1).numpy()
        mine = scores.logprobs[batch.target_offsets[i] : batch.target_offsets[i + 1]]
        np.testing.assert_allclose(mine, rows[one.positions, one.targets], atol=1e-5)


def test_gradients_of_several_passes_make_one_step(tmp_path):
    folder = build_model(tmp_path / "model")
    batch = make_batch(3, 2)
    params = AdamParams(lr=3e-3, clip_norm=0.5)

    def check(groups, _):
        at_once, apart = build_trainer(groups, folder), build_trainer(groups, folder)
        at_once.forward_backward(batch)
        for indices in ([0, 3], [5, 1, 2, 4]):
            apart.forward_backward(batch.select(indices))
        expected, got = (trainer.optim_step(OptimStep({"": params})) for trainer in (at_once, apart))
        assert got.grad_norms[""] == pytest.approx(expected.grad_norms[""], rel=1e-5) and got.steps == {"": 1}
        assert at_once.canary([5, 6, 7]) == pytest.approx(apart.canary([5, 6, 7]), abs=1e-5)
        assert apart.optim_step(OptimStep({"": params})).grad_norms == {"": 0.0}
        with pytest.raises(ConfigError, match="there is no adapter 'alice' here; a whole model is trained"):
            apart.optim_step(OptimStep({"alice": params}))

    run_alone(check)


def test_metrics_of_the_policy_compare_logprobs_before_the_update_with_the_rollouts(tmp_path):
    folder = build_model(tmp_path / "model")
    batch = make_batch(3, 2)

    def check(groups, _):
        trainer = build_trainer(groups, folder)
        gaps = np.abs(trainer.forward(batch).logprobs - batch.columns["rollout_logprobs"])
        metrics = take_step(trainer, batch, [[np.arange(3), np.arange(3, 6)]])
        assert metrics["policy/logprob_gap_mean"] == pytest.approx(gaps.mean(), abs=1e-5)
        assert metrics["policy/logprob_gap_max"] == pytest.approx(gaps.max(), abs=1e-5)
        assert metrics["train/tokens"] == batch.num_targets
        assert metrics["policy/ratio_mean"] == 1.0
        assert 0 < metrics["train/entropy"] <= math.log(23)

    run_alone(check)


def test_a_minibatch_has_a_gradient_as_large_as_the_batch(tmp_path):
    folder = build_model(tmp_path / "model")
    once = make_batch(3, 2)
    twice = once.select([*range(6), *range(6)])
    twice = twice.with_columns(loss_weights=twice.columns["loss_weights"] / 2)
    still = OptimizerConfig(lr=1e-12)

    def check(groups, _):
        one = take_step(build_trainer(groups, folder), once, [[np.arange(6)]], optimizer=still)
        two = take_step(build_trainer(groups, folder), twice, [[np.arange(6)], [np.arange(6, 12)]], optimizer=still)
        assert two["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-5)
        assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-5)

    run_alone(check)


def test_later_minibatches_see_a_ratio_to_the_weights_before_the_first(tmp_path):
    folder = build_model(tmp_path / "model")
    batch = make_batch(3, 2)

    def check(groups, _):
        trainer = build_trainer(groups, folder)
        metrics = take_step(trainer, batch, [[np.arange(3)], [np.arange(3, 6)]], optimizer=OptimizerConfig(lr=1e-2))
        assert metrics["policy/ratio_mean"] != 1.0
        assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=0.5)
        assert trainer.step == 1

    run_alone(check)


@pytest.mark.drill
@pytest.mark.parametrize("mesh", MESHES[2])
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all_and_training_goes_on(pair, mesh):
    for rank in pair:
        assert rank[mesh]["poisoned"] == {
            "skipped": 1.0, "unchanged": True, "next_is_finite": True, "next_changes": True, "step": 2}


def test_weights_that_a_step_makes_infinite_end_the_run_and_are_never_saved_or_published(tmp_path):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        trainer = build_trainer(groups, folder)
        train(trainer, [make_batch(2, 2)])
        with pytest.raises(DivergedError, match=r"not finite any more after 2 updates, .* and a weight decay of 1e.200"):
            train(trainer, [make_batch(2, 2)], optimizer=OPTIMIZER.model_copy(update={"weight_decay": 1e200}))

    run_alone(check)


def test_a_batch_that_trains_on_nothing_leaves_the_weights_alone(tmp_path):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        trainer = build_trainer(groups, folder)
        train(trainer, [make_batch(2, 2)])
        before = fingerprint_of(trainer)
        empty = make_batch(2, 2).select([])
        metrics = take_step(trainer, empty, [[np.array([], np.int64)]])
        assert metrics["train/skipped_steps"] == 1.0
        assert metrics["train/loss"] == 0.0
        assert fingerprint_of(trainer) == before

    run_alone(check)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_trainer_finds_the_fingerprint_and_the_canary_of_what_was_published(dtype, tmp_path):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        trainer = build_trainer(groups, folder)
        before = fingerprint_of(trainer, dtype)
        train(trainer, batches_of("many"))
        written = trainer.write_weights(WriteRequest(str(tmp_path / "v1"), dtype, (5, 6, 7, 8)))
        assert written.fingerprint == fingerprint_of(trainer, dtype) != before
        return written.fingerprint, written.canary_logprobs

    published, canary = run_alone(check)
    model = load_causal_lm(str(tmp_path / "v1"), dtype=dtype)
    assert fingerprint(named_bytes(model)) == published
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logprobs = log_softmax(model(tokens, use_cache=False).logits.float(), dim=-1)[0, :-1].gather(1, tokens[0, 1:, None])
    assert logprobs[:, 0].tolist() == pytest.approx(list(canary), abs=1e-5 if dtype == "float32" else 0.05)


def test_weights_are_written_while_the_canary_is_scored_and_a_full_disk_is_told_after_it(tmp_path, monkeypatch):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        trainer = build_trainer(groups, folder)
        write, score, ended, scored = trainer._write, trainer.canary, threading.Event(), []

        def write_and_tell(*arguments):
            try:
                return write(*arguments)
            finally:
                ended.set()

        def score_at_last(*arguments, **options):
            assert ended.wait(60), "the writer waits for the canary"
            scored.append(score(*arguments, **options))
            return scored[-1]

        monkeypatch.setattr(trainer, "_write", write_and_tell)
        monkeypatch.setattr(trainer, "canary", score_at_last)
        written = trainer.write_weights(WriteRequest(str(tmp_path / "v1"), "bfloat16", (5, 6, 7, 8)))
        assert written.canary_logprobs == scored[0] and written.fingerprint == fingerprint_of(trainer, "bfloat16")
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        with pytest.raises(StorageError, match="free space or choose another folder"):
            trainer.write_weights(WriteRequest(str(tmp_path / "v2"), "bfloat16", (5, 6, 7, 8)))
        assert len(scored) == 2 and not list(tmp_path.glob("*v2*"))

    run_alone(check)


@pytest.mark.parametrize("turns", [False, True])
def test_memory_is_given_back_for_engines_that_take_turns_once_a_version_is_written(turns, tmp_path, monkeypatch):
    folder, version = build_model(tmp_path / "model"), tmp_path / "v1"
    given_back = []
    monkeypatch.setattr(type(current_platform), "return_memory", lambda _: given_back.append((version / "model.safetensors").exists()))

    def check(groups, _):
        trainer = build_trainer(groups, folder)
        trainer._run = Config.model_validate({"cluster": {"take_turns": turns}})
        train(trainer, batches_of("many"))
        trainer.write_weights(WriteRequest(str(version), "float32", (5, 6, 7, 8)))

    run_alone(check)
    assert given_back == [True] * turns


def test_training_does_not_change_what_was_copied_out(tmp_path):
    folder = build_model(tmp_path / "model")

    def check(groups, _):
        trainer = build_trainer(groups, folder)
        state = trainer.snapshot("float32").state
        copies = {name: tensor.clone() for name, tensor in state.items()}
        train(trainer, batches_of("many"))
        assert all(torch.equal(state[name], copies[name]) for name in state)
        assert "lm_head.weight" not in state

    run_alone(check)


def _train_after_scoring(groups, folder):
    for mesh in MESHES[2]:
        trainer = build_trainer(groups, f"{folder}/model", mesh=mesh)
        trainer.canary([3, 4, 5, 6])
        train(trainer, [imitated(make_batch(2, 4))])
        trainer.restart_optimizer()
        assert trainer.step == 0
        before = trainer.snapshot("float32").state
        train(trainer, [make_batch(2, 4)])
        assert trainer.step == 1
        assert all(not torch.equal(tensor, before[name]) for name, tensor in trainer.snapshot("float32").state.items())
        trainer.save(Folder(f"{folder}/{mesh}"))


def test_an_optimizer_made_after_scoring_trains_all_parameters_and_can_be_saved(tmp_path):
    build_model(tmp_path / "model")
    run_ranks(_train_after_scoring, world=2, argument=str(tmp_path))


def test_supervised_losses_do_not_know_the_sampling_temperature(tmp_path):
    folder = build_model(tmp_path / "model")
    batch = imitated(make_batch(4, 2))

    def losses(groups, temperature):
        return train(build_trainer(groups, folder, temperature=temperature), [batch])[0]

    assert run_alone(losses, argument=0.5) == run_alone(losses, argument=1.0)


def test_a_resumed_trainer_obeys_its_present_settings(tmp_path):
    folder = build_model(tmp_path / "model")
    present = OptimizerConfig(lr=1e-3, weight_decay=0.5, beta2=0.5)

    def check(groups, _):
        trainer = build_trainer(groups, folder)
        train(trainer, [make_batch(2, 2)])
        trainer.save(Folder(str(tmp_path / "checkpoint")))
        resumed = build_trainer(groups, folder)
        assert resumed.load(Folder(str(tmp_path / "checkpoint"))).step == resumed.step == 1
        train(resumed, [make_batch(2, 2)], optimizer=present)
        return [(group["lr"], group["weight_decay"], group["betas"]) for group in resumed._optimizer.param_groups]

    assert run_alone(check) == [(1e-3, 0.5, (0.9, 0.5)), (1e-3, 0.0, (0.9, 0.5))]
