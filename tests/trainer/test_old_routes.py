"""The old policy's experts: all updates of a step replay them, whatever the weights have become; with the others' numbers otherwise."""


import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.model_trainer import ModelTrainer
from ranks import run_alone, run_ranks
from train_samples import OPTIMIZER, VOCAB, arranged, configure, imitated, make_batch, own_share, take_step

FAST = OPTIMIZER.model_copy(update={"lr": 0.05, "warmup_steps": 0})
MINIBATCHES = [[np.arange(0, 3), np.arange(3, 6)], [np.arange(6, 12)], [np.arange(0, 6)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=12, max_position_embeddings=64, sliding_window=None,
        bos_token_id=None, eos_token_id=1, pad_token_id=0)
    path = tmp_path_factory.mktemp("experts")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)
        model.save_pretrained(path)
    return str(path)


def build(groups, folder, *, replays, kind=ModelTrainer, **settings):
    config = configure(folder, lora={"rank": 2} if kind is BankTrainer else None, **settings)
    ranks = config.for_ranks
    model = ranks.model.model_copy(update={"route_replay": "old_policy" if replays else "off"})
    return kind.build(folder, config=ranks.model_copy(update={"model": model}), groups=groups)


def routes_in_updates(trainer, batch):
    """Metrics of a step of several updates, and the routes of the rows of each update."""
    seen, update = [], trainer._update

    def keep(batch, rows, params, *, scale):
        seen.append([row.routes for row in rows])
        return update(batch, rows, params, scale=scale)

    trainer._update = keep
    return take_step(trainer, batch, MINIBATCHES, optimizer=FAST), seen


@pytest.mark.parametrize(("kind", "imitates"), [(ModelTrainer, False), (ModelTrainer, True), (BankTrainer, False)])
def test_all_updates_replay_what_the_policy_chose_before_the_first(folder, kind, imitates):
    batch = imitated(make_batch(3, 4)) if imitates else make_batch(3, 4)

    def check(groups, _):
        trainer = build(groups, folder, replays=True, kind=kind, gradient_checkpointing="full")
        metrics, [first, second, third] = routes_in_updates(trainer, batch)
        assert [len(routes) for routes in (first, second, third)] == [2, 1, 1] and all(
            routes.dtype == np.uint8 and routes.shape[1] == 4 and routes.max() < 4 for routes in (*first, *second, *third))
        # The first update's routers agree with what is replayed, and later ones, whose weights have moved, no more.
        assert 0.5 < metrics["router/replay_agreement"] < 1
        other = build(groups, folder, replays=True, kind=kind)
        assert take_step(other, batch, MINIBATCHES[:1], optimizer=FAST)["router/replay_agreement"] == 0  # nothing is replayed
        plain = build(groups, folder, replays=False, kind=kind)
        without, seen = routes_in_updates(plain, batch)
        assert not any(routes is not None for rows in seen for routes in rows) and "router/replay_agreement" not in without
        assert metrics["train/loss"] != pytest.approx(without["train/loss"], rel=1e-6)

    run_alone(check)


def test_a_first_update_is_the_one_without_a_replay(folder):
    def check(groups, _):
        still = FAST.model_copy(update={"lr": 1e-12})
        found = [take_step(build(groups, folder, replays=replays), make_batch(3, 4), MINIBATCHES, optimizer=still)
                 for replays in (True, False)]
        assert found[0].pop("router/replay_agreement") == 1
        for name in ("train/loss", "train/grad_norm", "policy/ratio_max", "router/load_imbalance"):
            assert found[0][name] == pytest.approx(found[1][name], rel=1e-6)

    run_alone(check)


def _in_meshes(groups, folder):
    meshes = ("ddp",) if groups.world == 1 else ("ddp", "fsdp", "cp2", "tp2 ep2", "ep2")
    found = {}
    for mesh in meshes:
        trainer = build(arranged(groups, mesh), folder, replays=True)
        part, micros = own_share(trainer, make_batch(3, 4), max_tokens=40)
        metrics = take_step(trainer, part, [micros, micros], optimizer=OPTIMIZER)
        found[mesh] = [metrics[name] for name in ("train/loss", "train/grad_norm", "router/replay_agreement", "router/entropy")]
    return found


@pytest.mark.drill
def test_two_ranks_in_any_mesh_replay_as_one_does(folder):
    alone = run_alone(_in_meshes, argument=folder)["ddp"]
    for found in run_ranks(_in_meshes, world=2, argument=folder):
        assert len(found) == 5
        for mesh, numbers in found.items():
            assert numbers == pytest.approx(alone, rel=1e-4), mesh
