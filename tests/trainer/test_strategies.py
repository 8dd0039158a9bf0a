"""Which strategy is chosen, and that FSDP2 shards every decoder layer. That strategies compute the same is tested with `ModelTrainer`."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from offbeat.config.train import TrainConfig
from offbeat.errors import ModelError
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import packs_rows
from offbeat.model.values import put_value_head
from offbeat.sync.mesh import MeshShape
from offbeat.trainer import strategies
from offbeat.trainer.messages import Folder
from offbeat.trainer.policy import autocast, load_policy
from offbeat.trainer.strategies import Alone, Sharded, choose, load, whole_tensor
from ranks import run_alone, run_ranks
from train_samples import TINY, arranged, build_model, build_trainer, make_batch, own_share, score, take_step


def test_one_rank_holds_the_model_bare(tmp_path):
    model = load_causal_lm(build_model(tmp_path))
    strategy = run_alone(lambda groups, _: choose(model, groups=groups))
    assert type(strategy) is Alone
    assert strategy.model is model


@pytest.mark.parametrize("in_shards", [False, True])
def test_mixed_precision_keeps_float32_weights_whose_layers_multiply_in_bfloat16(tmp_path, in_shards):
    model = load_causal_lm(build_model(tmp_path))
    put_value_head(model)  # which is untied from the embeddings
    seen = {}

    def note(name):
        return lambda module, args, output: seen.update({name: (args[0].dtype, module.weight.dtype, output.dtype)})

    def check(groups, _):
        strategy = Sharded(model, groups, "bf16_mixed") if in_shards else choose(model, groups=groups, precision="bf16_mixed")
        assert type(strategy) is (Sharded if in_shards else Alone), "one rank computes under autocast"
        assert {p.dtype for p in strategy.model.parameters()} == {torch.float32}
        units = [module for module in strategy.model.modules() if isinstance(module, FSDPModule)]
        assert len(units) == in_shards * (TINY.num_layers + 3)  # the embeddings and the head are units of their own
        model.get_submodule("model.layers.0.mlp.up_proj").register_forward_hook(note("layer"))
        with autocast(TrainConfig(precision="bf16_mixed"), strategy.forward):
            logits = strategy.forward(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits
        logits.sum().backward()
        return {(p.grad.dtype, isinstance(p.grad, DTensor)) for p in strategy.model.parameters()}

    assert run_alone(check) == {(torch.float32, in_shards)}
    assert seen == {"layer": (torch.bfloat16, torch.bfloat16 if in_shards else torch.float32, torch.bfloat16)}


def test_a_model_whose_sequences_run_one_by_one_is_not_sharded(tmp_path):
    model = load_causal_lm(build_model(tmp_path), attention=None)
    with pytest.raises(ModelError, match=r"cannot pack its rows, which train.parallel.shard > 1 needs; use 1"):
        run_alone(lambda groups, _: choose(model, groups=replace(groups, shape=MeshShape(1, shard=2))))
    with pytest.raises(ModelError, match=r"which train.parallel.tp > 1 needs"):
        run_alone(lambda groups, _: strategies._check_packs(model, replace(groups, shape=MeshShape(1, tp=2))))


def _shard(groups, folder):
    model = load_causal_lm(folder)
    weight = model.get_input_embeddings().weight.detach().clone()
    strategy = choose(model, groups=arranged(groups, "fsdp"))
    assert type(strategy) is Sharded
    units = [module for module in strategy.model.modules() if isinstance(module, FSDPModule)]
    assert len(units) == TINY.num_layers + 1
    sharded = strategy.model.get_input_embeddings().weight
    assert isinstance(sharded, DTensor) and len(sharded.to_local()) < len(weight)
    assert torch.equal(whole_tensor(sharded.detach()), weight)


def test_every_decoder_layer_is_a_unit_of_its_own(tmp_path):
    run_ranks(_shard, world=2, argument=build_model(tmp_path))


def _load_by_parts(groups, folder):
    """Number of weights that this rank has read, whether they are its part of the whole ones, and what is not on a device."""
    def count(model):
        return sum(parameter.to_local().numel() for parameter in model.parameters())

    there, seen = arranged(groups, "fsdp"), []

    def read(divide):
        def watched(empty):
            divide(empty)
            seen.extend([empty.device.type, count(empty)])

        return load_policy(folder, config=TrainConfig(), divide=watched)

    model, strategy = load(read, groups=there)
    whole_model = load_causal_lm(folder)
    for (name, parameter), other in zip(model.named_parameters(), whole_model.parameters(), strict=True):
        assert torch.equal(whole_tensor(parameter.detach()), other), name
    for (name, buffer), other in zip(model.named_buffers(), whole_model.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    assert model.lm_head.weight is model.model.embed_tokens.weight and strategy.model is model and packs_rows(model)
    return [*seen, count(model)]


def test_a_rank_reads_no_more_than_its_own_shards(tmp_path):
    folder = build_model(tmp_path)
    ranks = run_ranks(_load_by_parts, world=2, argument=folder)
    num_weights = sum(parameter.numel() for parameter in load_causal_lm(folder).parameters())
    assert [device for device, *_ in ranks] == ["meta"] * 2, "nothing has been read when the model is divided"
    assert all(divided == read < 0.51 * num_weights for _, divided, read in ranks) and sum(read for *_, read in ranks) == num_weights


FOUR = ("ddp", "shard2", "tp2", "shard2 tp2", "shard2 cp2", "cp2 tp2", "cp4")


def _train_in_all_meshes(groups, folder):
    """By mesh, losses and norms of steps and what is published; and the same after a checkpoint of another mesh."""
    meshes = FOUR if groups.world == 4 else ("ddp",)
    found = {}
    for mesh in meshes:
        trainer = build_trainer(groups, f"{folder}/model", mesh=mesh)
        steps = _steps(trainer, range(2))
        trainer.save(Folder(f"{folder}/{mesh}"))
        found[mesh] = [*steps, *_steps(trainer, range(2, 4)), trainer.canary([3, 4, 5, 6])]
    if groups.world == 4:
        found["refreshed"] = _refresh(build_trainer(groups, f"{folder}/model", mesh="tp2", refresh_steps=1))
    for mesh, other in itertools.pairwise(meshes):
        trainer = build_trainer(groups, f"{folder}/model", mesh=other)
        trainer.load(Folder(f"{folder}/{mesh}"))
        found[f"{mesh} -> {other}"] = [*found[mesh][:2], *_steps(trainer, range(2, 4)), trainer.canary([3, 4, 5, 6])]
    return found


def _refresh(trainer):
    """How far a step that refreshes the reference moves it, and how far it is from the policy then."""
    batch = make_batch(3, 4, seed=9)
    before = score(trainer, batch, "reference")["logprobs"]
    _steps(trainer, [0])
    after, policy = (score(trainer, batch, of)["logprobs"] for of in ("reference", "policy"))
    return [float(np.abs(after - other).max()) for other in (before, policy)]


def _steps(trainer, seeds):
    results = []
    for seed in seeds:
        part, micros = own_share(trainer, make_batch(3, 4, seed=seed), max_tokens=30)
        metrics = take_step(trainer, part, [micros])
        results.append([metrics[f"train/{name}"] for name in ("loss", "grad_norm", "entropy", "tokens")])
    return results


@pytest.mark.drill
def test_four_ranks_compute_in_every_mesh_what_one_does(tmp_path):
    build_model(tmp_path / "model")
    *expected, canary = run_alone(_train_in_all_meshes, argument=str(tmp_path))["ddp"]
    ranks = run_ranks(_train_in_all_meshes, world=4, argument=str(tmp_path))
    assert len(ranks[0]) == 2 * len(FOUR)
    for found in ranks:
        moved, gap = found.pop("refreshed")
        assert moved > 0 and gap == 0, "replicas of a divided model refresh their reference, too"
        for mesh, (*steps, own_canary) in found.items():
            np.testing.assert_allclose(steps, expected, rtol=1e-5, atol=1e-5, err_msg=mesh)
            np.testing.assert_allclose(own_canary, canary, rtol=1e-5, atol=1e-5, err_msg=mesh)
