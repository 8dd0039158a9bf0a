"""Whatever a batch looks like, every mesh computes the loss and the gradient of one process."""

import json
from itertools import pairwise

import numpy as np
import pytest

from offbeat.config.train import OptimizerConfig
from offbeat.data.batch import Batch, SharedPrompts
from ranks import run_alone, run_ranks
from train_samples import PPO, VOCAB, build_model, build_trainer, train

MESHES = {1: ("ddp",), 2: ("ddp", "fsdp", "tp2", "cp2"), 4: ("shard2", "shard2 tp2", "cp2 tp2", "shard2 cp2")}
STILL = OptimizerConfig(lr=1e-12, clip_norm=1e9)
"""The weights stay as they are, so that each batch is a case of its own."""

LORA = {"rank": 2, "alpha": 4.0}
NUM_CASES = 8
"""In one call, since starting the ranks takes much longer than a case."""


def draw_case(rng):
    """A batch of up to 5 prompts with up to 4 answers each, and how it is cut into micro-batches."""
    groups = [
        (int(rng.integers(1, 13)), rng.integers(1, 21, size=rng.integers(1, 5)).tolist()) for _ in range(rng.integers(1, 6))]
    return {
        "seed": int(rng.integers(100)), "groups": groups, "max_tokens": int(rng.integers(32, 91)), "share_prefix": bool(rng.integers(2))}


def batch_of(case):
    """Groups of answers of the drawn lengths; of their tokens some are trained on, each with a weight of its own."""
    rng = np.random.default_rng(case["seed"])
    sequences, prefixes, group_ids = [], [], []
    for group, (prompt_len, answers) in enumerate(case["groups"]):
        prompt = rng.integers(2, VOCAB, prompt_len)
        for answer in answers:
            sequences.append(np.concatenate([prompt, rng.integers(2, VOCAB, answer)]))
            prefixes.append(prompt_len if len(answers) > 1 else 0)
            group_ids.append(group)
    lengths = np.array([len(sequence) for sequence in sequences])
    bounds = np.cumsum([0, *lengths])
    mask = rng.random(bounds[-1]) < 0.7
    for (low, high), prefix in zip(pairwise(bounds), prefixes, strict=True):
        mask[low : low + max(1, prefix)] = False
        mask[high - 1] = True
    return Batch.of_next_tokens(
        np.concatenate(sequences), mask, lengths=lengths, columns={
            "rollout_logprobs": np.log(1 / VOCAB) + 0.2 * rng.standard_normal(len(mask)), "advantages": rng.standard_normal(len(mask)),
            "loss_weights": mask * rng.random(len(mask))},
        losses=(PPO,), shared=SharedPrompts(np.array(group_ids), np.array(prefixes)))


def _train(groups, argument):
    """By mesh and kind of model: [loss, gradient norm] of each case."""
    folder, cases = argument
    found = {}
    for mesh in MESHES[groups.world]:
        for name, lora in (("whole", None), ("adapter", LORA)):
            trainer = build_trainer(groups, folder, mesh=mesh, lora=lora)
            found[f"{mesh}, {name}"] = [
                train(trainer, [batch_of(case)], max_tokens=case["max_tokens"], share_prefix=case["share_prefix"], optimizer=STILL)[0]
                for case in cases]
    return found


@pytest.mark.drill
def test_every_mesh_computes_the_loss_and_the_gradient_of_one_process(tmp_path):
    rng = np.random.default_rng(0)
    cases = [draw_case(rng) for _ in range(NUM_CASES)]
    assert {case["share_prefix"] for case in cases} == {False, True}
    argument = [build_model(tmp_path), cases]
    alone = run_alone(_train, argument=argument)
    assert all(norm > 0 for norm in np.array(alone["ddp, whole"])[:, 1])
    for world in (2, 4):
        for rank, found in enumerate(run_ranks(_train, world=world, argument=json.loads(json.dumps(argument)))):
            for name, figures in found.items():
                expected = alone[f"ddp, {name.partition(', ')[2]}"]
                np.testing.assert_allclose(figures, expected, rtol=1e-5, atol=1e-5, err_msg=f"{name}, rank {rank}")
