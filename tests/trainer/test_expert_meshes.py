"""Experts that are dealt to ranks with different rows: gradients, published weights and checkpoints are those of one process."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from offbeat.config.critic import CriticConfig
from offbeat.data.batch import LossSpec
from offbeat.trainer.messages import Folder
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.strategies import whole_tensor
from offbeat.trainer.value_trainer import ValueTrainer
from ranks import run_alone, run_ranks
from train_samples import OPTIMIZER, VOCAB, arranged, configure, imitated, make_batch, own_share, score, take_step, train

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
FAMILIES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "mixtral of 6": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 12},
    "qwen3_moe": MOE,
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 0}}
BALANCED = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Families for whose routers transformers has a load-balancing loss."""

MESHES = {1: ("ddp",), 2: ("ep2", "shard2 ep2"), 4: ("ep2", "ep4", "shard2 ep2", "shard4 ep2", "shard2 ep4")}
BATCH = imitated(make_batch(3, 3))
UNCLIPPED = OPTIMIZER.model_copy(update={"clip_norm": 0.0})
STEADY = OPTIMIZER.model_copy(update={"eps": 1e-5})
"""Which does not make steps of the rounding of gradients near zero, as Adam would."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A random model with strong weights of each family, each in a folder of its name."""
    folder = tmp_path_factory.mktemp("models")
    for family, sizes in FAMILIES.items():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family.split()[0]](**SIZES | sizes))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3)
            model.save_pretrained(folder / family)
    return folder


def drawn_cases(world, *, num, families):
    """Which rank has which sequences, in micro-batches of how many; whose experts the tokens use; and how the model trains."""
    found = []

    @settings(max_examples=num, database=None)
    @given(
        owners=st.lists(st.integers(0, world - 1), min_size=len(BATCH), max_size=len(BATCH)), most=st.integers(1, len(BATCH)),
        routes=st.sampled_from(["own", "random", "first"]), mesh=st.integers(0, len(MESHES[world]) - 1), family=st.sampled_from(families),
        recompute=st.sampled_from(["off", "full", "selective"]), balances=st.booleans())
    def collect(**case):
        found.append(case)

    collect()
    # The last rank has nothing to do; and no token uses an expert of another rank than the first.
    idle = {"owners": [0] * len(BATCH), "most": 4, "mesh": 0, "recompute": "full", "balances": True}
    return [*found, *({**idle, "routes": routes, "family": families[0]} for routes in ("own", "first"))]


def _routed(kind):
    """The batch with experts for its tokens: two of the four in each of two layers, the same in shared prompts; some are unknown."""
    if kind == "own":
        return BATCH
    first, second = np.random.default_rng(0).integers(0, [[[[4, 3]]]], (VOCAB, 64, 2, 2)).transpose(3, 0, 1, 2)
    table = np.stack([first, (first + 1 + second) % 4], axis=3).reshape(VOCAB, 64, 4).astype(np.uint8)
    table[::7] = 255
    routes = table[BATCH.tokens, np.concatenate([np.arange(length) for length in BATCH.lengths])]
    return replace(BATCH, routes=np.tile(np.array([0, 1, 1, 0], np.uint8), (BATCH.num_tokens, 1)) if kind == "first" else routes)


def _dealt_out(batch, case, *, rank, world):
    """A rank's sequences, and as many micro-batches on each; some may be empty."""
    mine = [np.flatnonzero(np.array(case["owners"]) == owner) for owner in range(world)]
    num_micros = max(-(-len(indices) // case["most"]) for indices in mine)
    own = mine[rank] if world > 1 else np.arange(len(batch))
    micros = [np.arange(len(own))[low : low + case["most"]] for low in range(0, case["most"] * num_micros, case["most"])]
    return batch.select(own), micros if world > 1 else [np.arange(len(own))]


def _gradients(groups, argument):
    """By case, losses and norms; whole gradients are written to a file."""
    folder, cases = argument
    trainers, found = {}, []
    for number, case in enumerate(cases):
        key = case["family"], MESHES[groups.world][case["mesh"] if groups.world > 1 else 0], case["recompute"], case["balances"]
        if key not in trainers:
            trainers[key] = _trainer(groups, folder, *key)
        trainer, gradients = trainers[key], {}
        part, micros = _dealt_out(_routed(case["routes"]), case, rank=groups.rank, world=groups.world)
        trainer._step = lambda name, params, trainer=trainer, gradients=gradients: gradients.update(
            {name: whole_tensor(p.grad).clone() for name, p in trainer.model.named_parameters()})
        metrics = take_step(trainer, part, [micros], optimizer=UNCLIPPED)
        if groups.rank == 0:
            torch.save(gradients, f"{folder}/{groups.world} {number}")
        names = ["loss", "grad_norm"], ["aux_loss"] if "router/aux_loss" in metrics else []
        found.append([*(metrics[f"train/{name}"] for name in names[0]), *(metrics[f"router/{name}"] for name in names[1])])
    return found


def _trainer(groups, folder, family, mesh, recompute, balances):
    coefficient = 0.5 if balances and family in BALANCED else 0.0
    config = configure(f"{folder}/{family}", gradient_checkpointing=recompute, router_aux_loss_coefficient=coefficient).for_ranks
    config = config.model_copy(update={"model": config.model.model_copy(update={"route_replay": "rollout"})})
    trainer = ModelTrainer.build(f"{folder}/{family}", config=config, groups=arranged(groups, mesh))
    experts = [parameter for name, parameter in trainer.model.named_parameters() if ".experts." in name]
    held = sum(parameter.to_local().numel() if groups.world > 1 else parameter.numel() for parameter in experts)
    whole, shape = sum(parameter.numel() for parameter in experts), trainer.groups.shape
    assert held * np.lcm(shape.shard, shape.ep) == whole > 0
    return trainer


@pytest.mark.parametrize(("world", "num", "families"), [
    (2, 6, ["mixtral", "glm4_moe"]), pytest.param(4, 30, sorted(FAMILIES.keys() - {"mixtral of 6"}), marks=pytest.mark.drill)])
def test_gradients_are_those_of_one_process_whichever_rank_has_which_rows(models, world, num, families):
    cases = drawn_cases(world, num=num, families=families)
    alone = run_alone(_gradients, argument=[str(models), cases])
    for rank, found in enumerate(run_ranks(_gradients, world=world, argument=[str(models), cases])):
        for case, numbers, expected in zip(cases, found, alone, strict=True):
            assert numbers == pytest.approx(expected, rel=1e-5), (rank, case)
    for number, case in enumerate(cases):
        expected, found = (torch.load(models / f"{size} {number}") for size in (1, world))
        assert expected.keys() == found.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5, msg=f"{name} {case}")


SAVED, AFTER = ([imitated(make_batch(3, 2, seed=seed)) for seed in seeds] for seeds in ((0, 1), (2, 3)))
RESUMED = {1: ("ddp",), 2: ("fsdp", "ep2", "shard2 ep2"), 4: ("ep2", "shard4 ep2")}


def _go_on(groups, argument):
    """By mesh: results straight on from a checkpoint of it, and from those of other meshes, also of `before`; and the published weights."""
    folder, family, before = argument
    results, meshes, path = {}, RESUMED[groups.world], f"{folder}/{family}"
    for mesh in meshes:
        trainer = _build(groups, path, mesh)
        first = train(trainer, SAVED, optimizer=STEADY)
        trainer.save(Folder(f"{path}/{mesh} {groups.world}"))
        results[mesh] = {"straight on": [first, train(trainer, AFTER, optimizer=STEADY)]}
        state = trainer.snapshot("float32").published()
        if groups.rank == 0:
            torch.save(state, f"{path}/published {mesh} {groups.world}")
    for mesh, other in product(meshes, [*(f"{mesh} {groups.world}" for mesh in meshes), *before]):
        trainer = _build(groups, path, mesh)
        trainer.load(Folder(f"{path}/{other}"))
        results[mesh][other] = train(trainer, AFTER, optimizer=STEADY)
    return results


def _build(groups, path, mesh):
    return ModelTrainer.build(path, config=configure(path, offload_optimizer=mesh == "ep2").for_ranks, groups=arranged(groups, mesh))


@pytest.mark.drill
@pytest.mark.parametrize(("world", "family"), [(2, "mixtral"), (4, "mixtral of 6")])  # of which two ranks share three as shards
def test_a_checkpoint_is_resumed_in_any_mesh_and_published_weights_are_whole(models, world, family):
    alone = run_alone(_go_on, argument=[str(models), family, []])["ddp"]
    several = run_ranks(_go_on, world=world, argument=[str(models), family, ["ddp 1"]])
    again = run_alone(_go_on, argument=[str(models), family, [f"{mesh} {world}" for mesh in RESUMED[world]]])["ddp"]
    first, after = alone["straight on"]
    for found in (*(rank[mesh] for rank, mesh in product(several, RESUMED[world])), again):
        np.testing.assert_allclose(found.pop("straight on"), [first, after], rtol=1e-5)
        assert len(found) == len(RESUMED[world]) + 1
        for other, steps in found.items():
            np.testing.assert_allclose(steps, after, rtol=1e-5, err_msg=other)
    expected = torch.load(models / family / "published ddp 1")
    assert any(name.endswith("experts.3.w2.weight") for name in expected)
    for mesh in RESUMED[world]:
        found = torch.load(models / family / f"published {mesh} {world}")
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


def test_mixed_precision_rounds_experts_as_other_layers_in_shards(models):
    alone = run_alone(_mixed, argument=str(models))
    for found in run_ranks(_mixed, world=2, argument=str(models)):
        for numbers in found.values():
            np.testing.assert_allclose(numbers, alone["ddp"], rtol=3e-2)
            assert numbers != alone["ddp"]


def _mixed(groups, folder):
    path, found = f"{folder}/mixtral", {}
    for mesh in MESHES[groups.world]:
        precision = "float32" if groups.world == 1 else "bf16_mixed"
        trainer = ModelTrainer.build(path, config=configure(path, precision=precision).for_ranks, groups=arranged(groups, mesh))
        part, micros = own_share(trainer, BATCH)
        metrics = take_step(trainer, part, [micros])
        found[mesh] = [metrics["train/loss"], metrics["train/grad_norm"]]
    return found


def _beside(groups, folder):
    """By mesh: scores of a reference that follows the policy, and what a critic's steps say."""
    path, found = f"{folder}/mixtral", {}
    for mesh in MESHES[groups.world]:
        there = arranged(groups, mesh)
        config = configure(path, algorithm={"kl_loss": "k3", "reference_refresh_steps": 1}).for_ranks
        policy = ModelTrainer.build(path, config=config, groups=there)
        first = train(policy, SAVED[:1], optimizer=STEADY)
        sums = [policy.groups.shares.sum_scalars(
            "scores", {name: values.astype(np.float64).sum() for name, values in score(policy, BATCH, of).items()})
            for of in ("policy", "reference")]
        critic = ValueTrainer.build_critic(path, config=config.model_copy(update={"critic": CriticConfig()}), groups=there, policy=None)
        valued = replace(BATCH, losses=(LossSpec("value", {"clip": 0.0}),)).with_columns(
            returns=np.random.default_rng(3).standard_normal(BATCH.num_targets), values=np.zeros(BATCH.num_targets))
        found[mesh] = [*first[0], *(sum["logprobs"] for sum in sums), *(number for step in train(critic, [valued] * 2) for number in step)]
    return found


@pytest.mark.drill
def test_references_and_critics_have_their_experts_dealt_as_the_policy(models):
    alone = run_alone(_beside, argument=str(models))["ddp"]
    assert alone[2] == pytest.approx(alone[3]), "the reference has been refreshed"
    for found in run_ranks(_beside, world=2, argument=str(models)):
        for mesh, numbers in found.items():
            assert numbers == pytest.approx(alone, rel=1e-4), mesh
