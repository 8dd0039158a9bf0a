"""Training on replayed experts: the same numbers on one rank and on two in every mesh, of a whole model and of an adapter."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.model_trainer import ModelTrainer
from ranks import run_alone, run_ranks
from train_samples import VOCAB, arranged, configure, imitated, make_batch, own_share, take_step

MAX_TOKENS = 40
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
FAMILIES = {
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}}


def build(folder, family):
    """A random model with strong weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | FAMILIES[family]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        model.save_pretrained(folder)
    return str(folder)


def _routed():
    """A batch whose tokens have each two experts at random of the four in each of two layers, and some unknown ones."""
    batch = imitated(make_batch(3, 4))
    first, second = np.random.default_rng(0).integers(0, [[[4, 3]]] * batch.num_tokens, (batch.num_tokens, 2, 2)).transpose(2, 0, 1)
    routes = np.stack([first, (first + 1 + second) % 4], axis=2).reshape(batch.num_tokens, 4).astype(np.uint8)
    routes[::7] = 255
    return replace(batch, routes=routes)


def _step(groups, folder, *, mesh, kind, replays=True, targets=("all-linear",)):
    there = arranged(groups, mesh)
    config = configure(folder, lora={"rank": 4, "targets": targets} if kind is BankTrainer else None, max_tokens_per_microbatch=MAX_TOKENS)
    ranks = config.for_ranks
    ranks = ranks.model_copy(update={"model": ranks.model.model_copy(update={"route_replay": "rollout" if replays else "off"})})
    trainer = kind.build(folder, config=ranks, groups=there)
    part, micros = own_share(trainer, _routed(), max_tokens=MAX_TOKENS)
    found = [take_step(trainer, part, [micros]) for _ in range(2)]
    routers = [f"router/{name}" for name in ("load_imbalance", "entropy", *(["replay_agreement"] if replays else []))]
    return [step[name] for step in found for name in ("train/grad_norm", "train/loss", *routers)]


def _in_meshes(groups, folder):
    meshes = ("ddp",) if groups.world == 1 else ("ddp", "fsdp", "cp2", "tp2 ep2", "ep2")
    cases = product((("mixtral", ModelTrainer), ("qwen3_moe", BankTrainer)), meshes)
    found = {f"{family} {mesh}": _step(groups, f"{folder}/{family}", mesh=mesh, kind=kind) for (family, kind), mesh in cases}
    experts = {"kind": BankTrainer, "targets": ("q_proj", "experts")}
    return found | {
        f"experts {mesh}": _step(groups, f"{folder}/qwen3_moe", mesh=mesh, **experts) for mesh in meshes if "ep" not in mesh}


@pytest.mark.drill
def test_two_ranks_in_any_mesh_train_on_replayed_experts_as_one_does(tmp_path):
    for family in ("mixtral", "qwen3_moe"):
        build(tmp_path / family, family)
    alone = run_alone(_in_meshes, argument=str(tmp_path))
    for found in run_ranks(_in_meshes, world=2, argument=str(tmp_path)):
        assert len(found) == 13 and all(len(numbers) == 10 for numbers in found.values())
        for case, numbers in found.items():
            assert numbers == pytest.approx(alone[f"{case.split()[0]} ddp"], rel=1e-4), case


def test_an_adapters_step_depends_on_the_replayed_experts(tmp_path):
    folder = build(tmp_path, "qwen3_moe")

    def check(groups, _):
        found = [_step(groups, folder, mesh="ddp", kind=BankTrainer, replays=replays) for replays in (True, False)]
        assert found[0][1] != pytest.approx(found[1][1], rel=1e-2)

    run_alone(check)
