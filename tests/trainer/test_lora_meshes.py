"""A run that trains one adapter on a model that ranks divide among them: as on one rank, and on from a checkpoint of any other mesh."""

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.algorithms.adam import AdamParams
from offbeat.data.batch import Batch
from offbeat.errors import ConfigError
from offbeat.model.load import load_causal_lm
from offbeat.model.peft_io import read_adapter
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.messages import ExportRequest, Folder, OptimStep, WriteRequest
from offbeat.trainer.state import full_state
from ranks import run_alone, run_ranks
from small_run import build_small_model
from train_samples import arranged, build_model, build_trainer, configure, imitated, make_batch, own_share, score, take_step, train

LORA = {"rank": 4, "alpha": 8.0}
PROBE = make_batch(4, 3, seed=9)
MESHES = {1: ("ddp",), 4: ("shard4", "shard2", "shard2 cp2")}
OPTIONS = {"checkpointed": {"gradient_checkpointing": "full"}, "apart": {"share_prefix": False}, "initial": {"refresh_steps": 0}}
"""Of which the last keeps the base model as the reference; all else refreshes it with each step."""

PARTS = ("begin", "on", "reference", "policy", "canary", "adapter")


def steps_of(trainer, seeds):
    """Losses, gradient norms, entropies and numbers of targets; with several micro-batches, whose samples share prompts."""
    results = []
    for seed in seeds:
        part, micros = own_share(trainer, make_batch(3, 4, seed=seed), max_tokens=30, share_prefix=trainer._config.share_prefix)
        metrics = take_step(trainer, part, [micros])
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


def _train_in_all_meshes(groups, folder):
    """By mesh, what must not depend on it; and what it is after a checkpoint of another mesh."""
    meshes, found = MESHES[groups.world], {}
    for mesh in meshes:
        trainer = build_trainer(groups, f"{folder}/model", lora=LORA, mesh=mesh, refresh_steps=1)
        base = full_state(trainer._model, dtype="float32", keep=True)
        begin = steps_of(trainer, range(2))
        trainer.save(Folder(f"{folder}/{mesh}"))
        found[mesh] = [begin, *_go_on(trainer)]
        after = full_state(trainer._model, dtype="float32", keep=True)
        assert all(torch.equal(tensor, after[name]) for name, tensor in base.items()), "the model stays as it was"
        assert all(parameter.grad is None for parameter in trainer._model.parameters())
    chain = [*meshes, *(["ddp"] if groups.world > 1 else [])]
    for mesh, other in itertools.pairwise(chain):
        trainer = build_trainer(groups, f"{folder}/model", lora=LORA, mesh=other, refresh_steps=1)
        trainer.load(Folder(f"{folder}/{mesh}"))
        found[f"{mesh} -> {other}"] = [found[mesh][0], *_go_on(trainer)]
    for name, options in OPTIONS.items():
        trainer = build_trainer(groups, f"{folder}/model", lora=LORA, mesh=meshes[0], **{"refresh_steps": 1} | options)
        found[name] = [steps_of(trainer, range(2)), *_go_on(trainer)]
    return found


def _go_on(trainer):
    reference = scores_of(trainer, "reference")
    return [steps_of(trainer, range(2, 4)), reference, scores_of(trainer, "policy"), trainer.canary([3, 4, 5, 6]), weights_of(trainer)]


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
    """The folder of a model with the checkpoints of all meshes; and what was found by one rank, and by each of four."""
    folder = tmp_path_factory.mktemp("meshes")
    build_model(folder / "model")
    alone = run_alone(_train_in_all_meshes, argument=str(folder))
    return folder, alone, run_ranks(_train_in_all_meshes, world=4, argument=str(folder))


def test_four_ranks_train_an_adapter_in_every_mesh_as_one_does(trained):
    _, alone, ranks = trained
    assert len(ranks[0]) == 2 * len(MESHES[4]) + len(OPTIONS)
    for found in ranks:
        for name, parts in found.items():
            for what, own, expected in zip(PARTS, parts, alone[name if name in OPTIONS else "ddp"], strict=True):
                assert_close(own, expected, f"{name}: {what}")


def test_one_process_goes_on_from_a_checkpoint_of_every_mesh(trained):
    folder, alone, _ = trained

    def check(groups, _):
        for mesh in MESHES[4]:
            trainer = build_trainer(groups, folder / "model", lora=LORA, refresh_steps=1)
            trainer.load(Folder(str(folder / mesh)))
            for what, own, expected in zip(PARTS[1:], _go_on(trainer), alone["ddp"][1:], strict=True):
                assert_close(own, expected, f"{mesh}: {what}")

    run_alone(check)


def _publish(groups, folder):
    """Write a version, and export it."""
    mesh = {1: "ddp", 2: "shard2"}[groups.world]
    trainer = build_trainer(groups, f"{folder}/model", lora=LORA, mesh=mesh)
    train(trainer, [make_batch(3, 2, seed=seed) for seed in range(2)])
    written = trainer.write_weights(WriteRequest(f"{folder}/version-{groups.world}", "float32", (3, 4, 5, 6)))
    trainer.export(ExportRequest(f"{folder}/export-{groups.world}", f"{folder}/model", "float32"))
    return [written.fingerprint, list(written.canary_logprobs), trainer.snapshot("float32").fingerprint()]


def test_a_version_and_an_export_are_written_as_one_process_writes_them(tmp_path):
    build_small_model(tmp_path / "model", seed=1)
    _, canary, _ = run_alone(_publish, argument=str(tmp_path))
    first, second = run_ranks(_publish, world=2, argument=str(tmp_path))
    assert first[0] == first[2] == second[2] == read_adapter(tmp_path / "version-2").fingerprint() and not second[0]
    assert first[1] == second[1] == pytest.approx(canary, abs=1e-5)
    for part in ("version-{}", "export-{}/adapter"):
        alone, both = (tmp_path / part.format(world) for world in (1, 2))
        assert sorted(file.name for file in alone.iterdir()) == sorted(file.name for file in both.iterdir())
        assert (alone / "adapter_config.json").read_bytes() == (both / "adapter_config.json").read_bytes()
        tensors = read_adapter(both).named_tensors()
        for name, tensor in read_adapter(alone).named_tensors().items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-5, atol=1e-5)
    merged, expected = (AutoModelForCausalLM.from_pretrained(tmp_path / f"export-{world}").state_dict() for world in (2, 1))
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert any(not torch.equal(tensor, base[name]) for name, tensor in merged.items())


def _drop(groups, folder):
    """By mesh, the adapter after steps with dropout."""
    found = {}
    for mesh in ("ddp", "shard2"):
        trainer = build_trainer(groups, folder, lora=LORA | {"dropout": 0.3}, mesh=mesh)
        train(trainer, [imitated(make_batch(3, 2, seed=seed)) for seed in range(2)])
        found[mesh] = weights_of(trainer)
    return found


def test_dropout_is_that_of_replicas(tmp_path):
    for found in run_ranks(_drop, world=2, argument=build_model(tmp_path / "model")):
        assert_close(found["shard2"], found["ddp"], "dropout")


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


def _hold(groups, folder):
    """The weights of the model that this rank holds by format and precision, those of its adapter, and the loss of a step."""
    found = {}
    for dtype, precision in itertools.product(("float32", "bfloat16"), ("float32", "bf16_mixed")):
        config = configure(folder, lora=LORA, precision=precision)
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        there = groups if groups.world == 1 else arranged(groups, "fsdp")
        trainer = BankTrainer.build(folder, config=config, groups=there)
        held = [getattr(parameter, "_local_tensor", parameter) for parameter in trainer._model.parameters()]
        part, micros = own_share(trainer, imitated(make_batch(3, 4)))
        losses = [take_step(trainer, part, [micros])["train/loss"] for _ in range(3)]
        found[f"{dtype} {precision}"] = [
            sum(tensor.nbytes for tensor in held), trainer._bank.weights.numel(), str(trainer._bank._computes), losses]
    return found


def test_a_rank_holds_its_shard_of_the_model_alone_in_the_format_of_the_model(tmp_path):
    folder = build_model(tmp_path / "model")
    alone = run_alone(_hold, argument=folder)
    num_weights = sum(parameter.numel() for parameter in load_causal_lm(folder).parameters())
    for found in run_ranks(_hold, world=2, argument=folder):
        for kind, (num_bytes, adapter, computes, losses) in found.items():
            whole, own_adapter, own_computes, own_losses = alone[kind]
            each = 4 if kind.startswith("float32") else 2
            assert whole == each * num_weights and num_bytes < 0.52 * whole
            assert adapter == own_adapter and own_computes == "torch.float32"
            assert computes == ("torch.bfloat16" if kind.endswith("bf16_mixed") else "torch.float32")
            np.testing.assert_allclose(losses, own_losses, rtol=1e-5 if kind == "float32 float32" else 0.01, err_msg=kind)
            assert losses[-1] < losses[0]


def _refuse(groups, folder):
    config = configure(folder, lora=LORA)
    with pytest.raises(ConfigError, match=r"train.parallel.shard must be 1 to train many adapters, got 2; .* give it the whole model"):
        BankTrainer.build_empty(folder, config=config, groups=arranged(groups, "shard2"))


def test_many_adapters_are_trained_on_whole_models(tmp_path):
    run_ranks(_refuse, world=2, argument=build_model(tmp_path / "model"))
