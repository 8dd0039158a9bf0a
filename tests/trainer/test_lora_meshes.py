"""A run that trains one adapter on a model that ranks divide among them: as on one rank, and on from a checkpoint of any other mesh."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.algorithms.adam import AdamParams
from offbeat.data.batch import Batch, LossSpec
from offbeat.data.tokenizer import character_tokenizer
from offbeat.errors import ConfigError
from offbeat.model.load import load_causal_lm
from offbeat.model.peft_io import read_adapter
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.messages import ExportRequest, Folder, OptimStep, WriteRequest
from offbeat.trainer.state import full_state
from offbeat.trainer.worker import build_trainers
from ranks import run_alone, run_ranks
from train_samples import (
    OPTIMIZER,
    arranged,
    build_model,
    build_trainer,
    configure,
    imitated,
    make_batch,
    own_share,
    score,
    take_step,
    train,
)

LORA = {"rank": 4, "alpha": 8.0}
PROBE = make_batch(2, 4, seed=9)
PAIRS = ("shard2", "tp2")
KINDS = {"alone": ("ddp",), "shards": ("shard2", "shard2 cp2"), "slices": ("tp2", "shard2 tp2", "cp2 tp2")}
"""Meshes by kind, of one rank and of four; what remains of four ranks in each are replicas."""

STEADY = OPTIMIZER.model_copy(update={"eps": 1e-5})
"""Which does not make steps of the rounding of gradients near zero, as Adam would."""

OPTIONS = {"gradient_checkpointing": "full", "share_prefix": False, "refresh_steps": 0}
"""Another way to compute the same, but for the reference: this one is the base model, and others are refreshed with each step."""

OPTION_MESHES = {"alone": "ddp", "shards": "shard2 cp2", "slices": "shard2 tp2"}

PARTS = ("begin", "on", "reference", "policy", "canary", "adapter")


def steps_of(trainer, seeds):
    """Losses, gradient norms, entropies and numbers of targets; with several micro-batches, whose samples share prompts."""
    results = []
    for seed in seeds:
        part, micros = own_share(trainer, make_batch(2, 4, seed=seed), max_tokens=30, share_prefix=trainer._config.share_prefix)
        metrics = take_step(trainer, part, [micros], optimizer=STEADY)
        results.append([metrics[f"train/{name}"] for name in ("loss", "grad_norm", "entropy", "tokens")])
    return results


def scores_of(trainer, of):
    """The scores of this rank's share of the probe, added to those of all others."""
    found = score(trainer, PROBE, of, with_entropy=True, max_tokens=30)
    total = trainer.groups.shares.sum_scalars(
        f"scores {of}", {f"{name} {i}": value for name, values in found.items() for i, value in enumerate(values.tolist())})
    return list(total.values())


def weights_of(trainer):
    return {name: tensor.flatten().tolist() for name, tensor in trainer.snapshot("float32").adapter.named_tensors().items()}


def _train_in_meshes(groups, argument):
    """By mesh of a kind, what must not depend on it; and what it is after a checkpoint of the mesh before, the first time of one rank."""
    folder, kind = argument
    found, last = {}, "ddp"
    for mesh in KINDS[kind]:
        trainer = build_trainer(groups, f"{folder}/model", lora=LORA, mesh=mesh, refresh_steps=1)
        base = full_state(trainer._model, dtype="float32", keep=True)
        begin = steps_of(trainer, range(2))
        trainer.save(Folder(f"{folder}/{mesh}"))
        found[mesh] = [begin, *_go_on(trainer)]
        after = full_state(trainer._model, dtype="float32", keep=True)
        assert all(torch.equal(tensor, after[name]) for name, tensor in base.items()), "the model stays as it was"
        assert all(parameter.grad is None for parameter in trainer._model.parameters())
        trainer.load(Folder(f"{folder}/{last}"))
        found[f"{last} -> {mesh}"], last = [begin, *_go_on(trainer)], mesh
    trainer = build_trainer(groups, f"{folder}/model", lora=LORA, mesh=OPTION_MESHES[kind], **OPTIONS)
    found["options"] = [steps_of(trainer, range(2)), *_go_on(trainer)]
    return found


def _go_on(trainer):
    reference = scores_of(trainer, "reference")
    return [steps_of(trainer, [2]), reference, scores_of(trainer, "policy"), trainer.canary([3, 4, 5, 6]), weights_of(trainer)]


def assert_close(found, expected, name):
    """Numbers in lists and dictionaries."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key], f"{name} {key}")
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a model with checkpoints, and what was found by one rank."""
    folder = tmp_path_factory.mktemp("meshes")
    build_model(folder / "model")
    return folder, run_alone(_train_in_meshes, argument=[str(folder), "alone"])


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["shards", "slices"])
def test_four_ranks_train_an_adapter_in_every_mesh_as_one_does_and_each_goes_on_from_the_other(trained, kind):
    folder, alone = trained
    for found in run_ranks(_train_in_meshes, world=4, argument=[str(folder), kind]):
        assert len(found) == 2 * len(KINDS[kind]) + 1
        for name, parts in found.items():
            for what, own, expected in zip(PARTS, parts, alone["options" if name == "options" else "ddp"], strict=True):
                assert_close(own, expected, f"{name}: {what}")

    def resume(groups, _):
        trainer = build_trainer(groups, folder / "model", lora=LORA, refresh_steps=1)
        for mesh in KINDS[kind]:
            trainer.load(Folder(str(folder / mesh)))
            for what, own, expected in zip(PARTS[1:], _go_on(trainer), alone["ddp"][1:], strict=True):
                assert_close(own, expected, f"{mesh} -> one process: {what}")

    run_alone(resume)


def _publish(groups, folder):
    """By mesh, what is known of a version that is written; and export it."""
    found = {}
    for mesh in ("ddp",) if groups.world == 1 else PAIRS:
        trainer = build_trainer(groups, f"{folder}/model", lora=LORA, mesh=mesh)
        train(trainer, [make_batch(3, 2, seed=seed) for seed in range(2)], optimizer=STEADY)
        written = trainer.write_weights(WriteRequest(f"{folder}/version-{mesh}", "float32", (3, 4, 5, 6)))
        trainer.export(ExportRequest(f"{folder}/export-{mesh}", f"{folder}/model", "float32"))
        found[mesh] = [written.fingerprint, list(written.canary_logprobs), trainer.snapshot("float32").fingerprint()]
    return found


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with what one rank and two have written, and what they know of it."""
    folder = tmp_path_factory.mktemp("published")
    build_model(folder / "model")
    character_tokenizer().save(folder / "model")
    return folder, run_alone(_publish, argument=str(folder)), run_ranks(_publish, world=2, argument=str(folder))


@pytest.mark.parametrize("mesh", PAIRS)
def test_a_version_and_an_export_are_written_as_one_process_writes_them(published, mesh):
    folder, alone, ranks = published
    first, second = (found[mesh] for found in ranks)
    assert first[0] == first[2] == second[2] == read_adapter(folder / f"version-{mesh}").fingerprint() and not second[0]
    assert first[1] == second[1] == pytest.approx(alone["ddp"][1], abs=1e-5)
    for part in ("version-{}", "export-{}/adapter"):
        alone, both = (folder / part.format(name) for name in ("ddp", mesh))
        assert sorted(file.name for file in alone.iterdir()) == sorted(file.name for file in both.iterdir())
        assert (alone / "adapter_config.json").read_bytes() == (both / "adapter_config.json").read_bytes()
        tensors = read_adapter(both).named_tensors()
        for name, tensor in read_adapter(alone).named_tensors().items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-5, atol=1e-5)
    merged, expected = (AutoModelForCausalLM.from_pretrained(folder / f"export-{name}").state_dict() for name in (mesh, "ddp"))
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert any(not torch.equal(tensor, base[name]) for name, tensor in merged.items())


def _drop(groups, folder):
    """By mesh, the adapter after steps with dropout."""
    found = {}
    for mesh in ("ddp", *PAIRS)[: 3 * groups.world - 2]:
        trainer = build_trainer(groups, folder, lora=LORA | {"dropout": 0.3}, mesh=mesh)
        train(trainer, [imitated(make_batch(3, 2, seed=seed)) for seed in range(2)], optimizer=STEADY)
        found[mesh] = weights_of(trainer)
    return found


def test_dropout_is_that_of_replicas_and_ranks_of_a_tensor_group_drop_what_one_would(tmp_path):
    folder = build_model(tmp_path / "model")
    alone = run_alone(_drop, argument=folder)
    for found in run_ranks(_drop, world=2, argument=folder):
        assert_close(found["shard2"], found["ddp"], "shard2")
        assert_close(found["tp2"], alone["ddp"], "tp2")


def _pass_unequal_rows(groups, folder):
    """Losses of sequences and the gradient's norm, where rank 0 has three times the rows of rank 1."""
    trainer = build_trainer(groups, folder, lora=LORA, mesh="fsdp" if groups.world > 1 else "ddp", max_tokens_per_microbatch=15)
    batch = imitated(make_batch(1, 4, prompt_len=3))
    mine = range(4) if groups.world == 1 else (0, 1, 2) if groups.rank == 0 else (3,)
    answer = trainer.forward_backward(batch.select(mine))
    losses = groups.sync.sum_scalars("losses", {str(i): dict(zip(mine, answer.losses.tolist(), strict=True)).get(i, 0.0) for i in range(4)})
    norms = trainer.optim_step(OptimStep({"": AdamParams(lr=1e-3)})).grad_norms
    nothing = trainer.forward(Batch.select(batch, [] if groups.rank else [0]))
    return [list(losses.values()), norms[""], len(nothing.losses)]


def test_ranks_with_unequal_numbers_of_rows_wait_for_each_other(tmp_path):
    folder = build_model(tmp_path / "model")
    losses, norm, _ = run_alone(_pass_unequal_rows, argument=folder)
    for rank, (own_losses, own_norm, num) in enumerate(run_ranks(_pass_unequal_rows, world=2, argument=folder)):
        np.testing.assert_allclose(own_losses, losses, atol=1e-5)
        assert own_norm == pytest.approx(norm, rel=1e-5) and num == 1 - rank


def _learn_beside_a_critic(groups, folder):
    """By mesh, steps of an adapter and of the critic beside it."""
    found, rng = {}, np.random.default_rng(3)
    batch = make_batch(3, 2)
    batch = replace(batch, losses=(LossSpec("value", {"clip": 0.0}),)).with_columns(
        returns=rng.standard_normal(batch.num_targets), values=np.zeros(batch.num_targets))
    for mesh in PAIRS if groups.world > 1 else ("ddp",):
        config = configure(folder, lora=LORA, algorithm={"preset": "ppo"}, precision="float32")
        parts = build_trainers(folder, config.for_ranks, arranged(groups, mesh))
        share, micros = own_share(parts["critic"], batch)
        critic = [take_step(parts["critic"], share, [micros], optimizer=STEADY)["train/loss"] for _ in range(3)]
        found[mesh] = [critic, steps_of(parts[""], range(2))]
    return found


@pytest.mark.drill
def test_a_critic_beside_an_adapter_learns_as_on_one_rank(tmp_path):
    folder = build_model(tmp_path / "model")
    expected = run_alone(_learn_beside_a_critic, argument=folder)["ddp"]
    assert expected[0][2] < expected[0][0]
    for found in run_ranks(_learn_beside_a_critic, world=2, argument=folder):
        for mesh in PAIRS:
            for own, wanted in zip(found[mesh], expected, strict=True):
                assert_close(own, wanted, mesh)


def _hold(groups, folder):
    """By mesh, format and precision: bytes of the model that this rank holds, weights of its adapter, its format, and losses of steps."""
    found = {}
    for mesh, dtype, precision in itertools.product(
            PAIRS if groups.world > 1 else ("ddp",), ("float32", "bfloat16"), ("float32", "bf16_mixed")):
        config = configure(folder, lora=LORA, precision=precision)
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        trainer = BankTrainer.build(folder, config=config.for_ranks, groups=arranged(groups, mesh))
        held = [getattr(parameter, "_local_tensor", parameter) for parameter in trainer._model.parameters()]
        part, micros = own_share(trainer, imitated(make_batch(3, 4)))
        losses = [take_step(trainer, part, [micros])["train/loss"] for _ in range(3)]
        found[f"{mesh} {dtype} {precision}"] = [
            sum(tensor.nbytes for tensor in held), trainer._bank.weights.numel(), str(trainer._bank._computes), losses]
    return found


@pytest.mark.drill
def test_a_rank_holds_its_part_of_the_model_alone_in_the_format_of_the_model(tmp_path):
    folder = build_model(tmp_path / "model")
    alone = run_alone(_hold, argument=folder)
    num_weights = sum(parameter.numel() for parameter in load_causal_lm(folder).parameters())
    for found in run_ranks(_hold, world=2, argument=folder):
        assert len(found) == 8
        for kind, (num_bytes, adapter, computes, losses) in found.items():
            mesh, dtype, precision = kind.split()
            whole, whole_adapter, _, expected = alone[f"ddp {dtype} {precision}"]
            assert whole == {"float32": 4, "bfloat16": 2}[dtype] * num_weights and adapter == whole_adapter
            assert num_bytes < {"shard2": 0.52, "tp2": 0.6}[mesh] * whole, "a tensor group has slices of all but the norms"
            assert computes == ("torch.bfloat16" if mesh == "shard2" and precision == "bf16_mixed" else "torch.float32")
            np.testing.assert_allclose(losses, expected, rtol=1e-5 if dtype == precision else 0.01, err_msg=kind)
            assert losses[-1] < losses[0]


def _refuse(groups, folder):
    for mesh in PAIRS:
        with pytest.raises(ConfigError, match=rf"train.parallel.{mesh[:-1]} must be 1 to train many adapters, got 2; .* the whole model"):
            BankTrainer.build_empty(folder, config=configure(folder, lora=LORA), groups=arranged(groups, mesh))


def test_many_adapters_are_trained_on_whole_models(tmp_path):
    run_ranks(_refuse, world=2, argument=build_model(tmp_path / "model"))
