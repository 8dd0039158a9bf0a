"""Random batches, a small model and trainers for the tests of the trainer and of checkpoints."""

import math
import tempfile
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from offbeat.algorithms.adam import adam_params
from offbeat.algorithms.objectives import CROSS_ENTROPY, policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.model import TinyConfig
from offbeat.config.root import Config
from offbeat.config.train import OptimizerConfig
from offbeat.data.batch import Batch, SharedPrompts
from offbeat.data.packing import plan_microbatches
from offbeat.model.tiny import build_tiny
from offbeat.sync.mesh import MeshShape, build_expert_mesh, build_meshes
from offbeat.trainer.bank_trainer import BankTrainer
from offbeat.trainer.messages import Folder, ScoreShare, TrainStep
from offbeat.trainer.model_trainer import ModelTrainer

TINY = TinyConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48, max_positions=64)
VOCAB = 23
PPO = policy_loss(AlgorithmConfig())
MESHES = {1: ("ddp",), 2: ("ddp", "fsdp", "tp2", "cp2")}
"""The meshes that a number of ranks is tried in; see `arranged`."""

OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=2, schedule="linear", clip_norm=0.5, weight_decay=0.01)


def train_and_resume(kind, groups, folder, mesh, take_steps, *, num_steps):
    """Build a trainer in a mesh, take steps with `take_steps(trainer, count)` and save; one that resumes takes the same two next.

    Returns:
        The trainer, and what its first steps gave.
    """
    trainer = kind.build(folder, config=configure(folder), groups=arranged(groups, mesh))
    steps = take_steps(trainer, num_steps)
    at = Folder(f"{folder}-{mesh}-{groups.world}")
    trainer.save(at)
    resumed = kind.build(folder, config=configure(folder), groups=arranged(groups, mesh))
    resumed.load(at)
    assert take_steps(trainer, 2) == take_steps(resumed, 2)
    return trainer, steps


def build_model(folder):
    build_tiny(folder, tiny=TINY, vocab_size=VOCAB, eos_token_id=1, pad_token_id=0, seed=7)
    return str(folder)


def make_batch(num_groups, group_size, *, seed=0, prompt_len=5, loss=PPO):
    """Groups of samples with a shared prompt, random answers, advantages and near-policy log-probabilities; token-mean weights."""
    rng = np.random.default_rng(seed)
    tokens, mask, group_ids, lengths = [], [], [], []
    for group in range(num_groups):
        prompt = rng.integers(2, VOCAB, prompt_len)
        for _ in range(group_size):
            answer = rng.integers(2, VOCAB, rng.integers(2, 9))
            tokens.append(np.concatenate([prompt, answer]))
            mask.append(np.concatenate([np.zeros(prompt_len, bool), np.ones(len(answer), bool)]))
            group_ids.append(group)
            lengths.append(len(tokens[-1]))
    trained = np.concatenate(mask)
    return Batch.of_next_tokens(
        np.concatenate(tokens), trained, lengths=lengths, columns={
            "rollout_logprobs": np.log(1 / VOCAB) + 0.2 * rng.standard_normal(len(trained)),
            "advantages": np.repeat(rng.standard_normal(len(lengths)), lengths), "loss_weights": trained / trained.sum()},
        losses=(loss,), shared=SharedPrompts(
            np.array(group_ids), np.full(len(lengths), prompt_len if group_size > 1 else 0)))


def imitated(batch):
    """The same sequences, to be learnt by heart."""
    return replace(batch, losses=(CROSS_ENTROPY,))


def share(batch, *, rank, world, max_tokens=64, share_prefix=True):
    """One rank's part of a batch, and its micro-batches."""
    mine = plan_microbatches(batch, num_ranks=world, max_tokens=max_tokens, share_prefix=share_prefix).microbatches[rank]
    order = np.concatenate([np.empty(0, np.int64), *mine])
    bounds = np.cumsum([0, *(len(indices) for indices in mine)])
    return batch.select(order), [np.arange(low, high) for low, high in pairwise(bounds)]


def own_share(trainer, batch, **settings):
    """The part of a batch that a trainer's rank is given, and its micro-batches."""
    return share(batch, rank=trainer.groups.batch_index, world=trainer.groups.batch_ranks, **settings)


def configure(folder="", *, lora=None, temperature=1.0, algorithm=None, **train):
    """The configuration of a run; further keywords are settings of [train]."""
    return Config.model_validate({
        "model": {"path": str(folder), "lora": lora or {}}, "rollout": {"temperature": temperature}, "train": train,
        "algorithm": algorithm or {}})


@cache
def arranged(groups, mesh):
    """The same ranks in another mesh: "ddp" (replicas), "fsdp" (shards over all of them), or sizes such as "shard2 tp2", to which "ep2" may
    be added; collective."""
    parts = [f"shard{groups.world}"] if mesh == "fsdp" else [] if mesh == "ddp" else mesh.split()
    sizes = {part[:-1]: int(part[-1]) for part in parts}
    divided = math.prod(size for name, size in sizes.items() if name != "ep")
    shape = MeshShape(groups.world // divided, **sizes)
    shape.check(groups.world)
    whole, gradient_mesh = build_meshes(shape)
    return replace(groups, shape=shape, mesh=whole, gradient_mesh=gradient_mesh, expert_mesh=build_expert_mesh(shape))


def build_trainer(groups, folder, *, lora=None, temperature=1.0, refresh_steps=None, mesh="ddp", **train):
    """A trainer; with a reference that is refreshed after so many steps, if a number is given."""
    algorithm = None if refresh_steps is None else {"kl_loss": "k3", "reference_refresh_steps": refresh_steps}
    config = configure(folder, lora=lora, temperature=temperature, algorithm=algorithm, **train)
    return (BankTrainer if lora else ModelTrainer).build(str(folder), config=config.for_ranks, groups=arranged(groups, mesh))


def take_step(trainer, batch, minibatches, *, optimizer=OPTIMIZER, total_steps=10):
    """Metrics of one training step on this rank's share."""
    params = adam_params(trainer.step, config=optimizer, total_steps=total_steps)
    return trainer.train_step(TrainStep(batch, tuple(map(tuple, minibatches)), params)).metrics


def score(trainer, batch, of="policy", *, with_entropy=False, max_tokens=64):
    """The scores of the batch by name; those of other ranks are 0."""
    plan = plan_microbatches(batch, num_ranks=trainer.groups.batch_ranks, max_tokens=max_tokens, share_prefix=True)
    micros = tuple(plan.microbatches[trainer.groups.batch_index])
    return trainer.score(ScoreShare(batch, np.arange(len(batch)), micros, of, with_entropy)).scores.columns


def train(trainer, batches, *, max_tokens=64, share_prefix=True, optimizer=OPTIMIZER):
    """[loss, gradient norm] of one step per batch."""
    results = []
    for batch in batches:
        part, micros = own_share(trainer, batch, max_tokens=max_tokens, share_prefix=share_prefix)
        metrics = take_step(trainer, part, [micros], optimizer=optimizer)
        results.append([metrics["train/loss"], metrics["train/grad_norm"]])
    return results


def temporary_model():
    """A folder that lives as long as the returned object, with a model in it; its path is `.name`."""
    folder = tempfile.TemporaryDirectory()
    build_model(Path(folder.name))
    return folder
