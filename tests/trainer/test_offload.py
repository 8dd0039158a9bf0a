"""Moments in host memory: the very weights that torch's optimizer gives, whole and in shards, and checkpoints for either."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from offbeat.algorithms.adam import AdamParams
from offbeat.config.root import Config
from offbeat.trainer import offload
from offbeat.trainer.messages import Folder
from offbeat.trainer.offload import OffloadedAdamW
from offbeat.trainer.optim import build_optimizer, set_params
from ranks import run_ranks
from train_samples import build_model, build_trainer, make_batch, train

PARAMS = AdamParams(lr=1e-2, weight_decay=0.1)


def parameters():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 3))
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(0.5)))
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(4)))
    return model


def give_gradients(model, seed):
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.grad = None if name == "unused" else torch.randn_like(parameter)


@pytest.mark.parametrize("part_size", [64, 1000, 2**26])
def test_weights_and_moments_are_those_of_torch_to_the_bit(part_size, monkeypatch):
    moved = []
    monkeypatch.setattr(offload, "_to_device", lambda host, beside: moved.append(host.numel()) or host.clone())
    plain, own = parameters(), parameters()
    theirs, ours = build_optimizer(plain), OffloadedAdamW(build_optimizer(own).param_groups, part_size=part_size)
    for step in range(3):
        for model, optimizer in ((plain, theirs), (own, ours)):
            give_gradients(model, step)
            set_params(optimizer, PARAMS)
            optimizer.step()
    for (name, mine), other in zip(own.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other), name
        assert ours.state[mine].keys() == theirs.state[other].keys()
        assert all(torch.equal(ours.state[mine][key], value) for key, value in theirs.state[other].items()), name
    assert max(moved) <= part_size and sum(moved) == 3 * 2 * (32 * 64 + 64 + 128 + 195 + 1)


def test_a_part_holds_no_more_than_its_size(monkeypatch):
    parts = []
    monkeypatch.setattr(offload, "_update", lambda part, _group: parts.append([piece.weights.numel() for piece in part]))
    model = torch.nn.Linear(8, 100)
    give_gradients(model, 0)
    OffloadedAdamW([{"params": list(model.parameters())}], part_size=96).step()
    assert parts == [[96]] * 8 + [[32]] + [[96]] + [[4]]


def test_either_loads_what_the_other_saved():
    plain, own = parameters(), parameters()
    theirs, ours = build_optimizer(plain), build_optimizer(own, offloads=True)
    give_gradients(plain, 0)
    set_params(theirs, PARAMS)
    theirs.step()
    own.load_state_dict(plain.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == PARAMS.lr
    again = parameters()
    again.load_state_dict(plain.state_dict())
    back = build_optimizer(again)
    back.load_state_dict(deepcopy(ours.state_dict()))  # torch's takes tensors as they are, and would share them
    for model, optimizer in ((plain, theirs), (own, ours), (again, back)):
        give_gradients(model, 1)
        optimizer.step()
    for mine, other, third in zip(own.parameters(), plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other) and torch.equal(third, other)


BATCHES, AFTER = [make_batch(3, 2, seed=seed) for seed in range(2)], [make_batch(3, 2, seed=seed) for seed in range(2, 4)]


def _train(groups, folder):
    """By mesh: results with and without, then of checkpoints that were resumed across the option."""
    results = {}
    for mesh in ("ddp", "fsdp", "tp2"):
        found = {}
        for name, offloads in (("without", False), ("with", True)):
            trainer = build_trainer(groups, f"{folder}/model", mesh=mesh, offload_optimizer=offloads)
            before = train(trainer, BATCHES)
            trainer.save(Folder(f"{folder}/{mesh}-{name}"))
            found[name] = before + train(trainer, AFTER)
            if offloads:
                assert isinstance(trainer._optimizer, OffloadedAdamW)
                parameter, state = next(iter(trainer._optimizer.state.items()))
                assert isinstance(state["exp_avg"], DTensor) == isinstance(parameter, DTensor)
        for name, offloads in (("with", False), ("without", True)):
            trainer = build_trainer(groups, f"{folder}/model", mesh=mesh, offload_optimizer=offloads)
            trainer.load(Folder(f"{folder}/{mesh}-{name}"))
            found[f"after {name}"] = train(trainer, AFTER)
        results[mesh] = found
    moved = build_trainer(groups, f"{folder}/model", mesh="ddp", offload_optimizer=True)
    moved.load(Folder(f"{folder}/fsdp-with"))
    results["moved"] = train(moved, AFTER)
    return results


@pytest.mark.drill
def test_steps_of_two_ranks_are_equal_and_checkpoints_resume_across_the_option(tmp_path: Path):
    build_model(tmp_path / "model")
    for rank in run_ranks(_train, world=2, argument=str(tmp_path)):
        for mesh in ("ddp", "fsdp", "tp2"):
            found = rank[mesh]
            assert found["with"] == found["without"], mesh
            assert found["after with"] == found["after without"] == found["without"][len(BATCHES):], mesh
        for mine, other in zip(rank["moved"], rank["fsdp"]["with"][len(BATCHES):], strict=True):
            assert mine == pytest.approx(other, abs=1e-5)


def test_adapters_have_no_use_for_it():
    with pytest.raises(ValueError, match=r"train.offload_optimizer must be false with model.lora.rank > 0, got true"):
        Config.model_validate({"model": {"lora": {"rank": 4}}, "train": {"offload_optimizer": True}})
