"""Random batches, a small model and engines for the tests of the trainer and of checkpoints."""

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.model import TinyConfig
from offbeat.config.train import OptimizerConfig, TrainConfig
from offbeat.data.batch import TokenBatch
from offbeat.data.packing import plan_microbatches
from offbeat.model.tiny import build_tiny
from offbeat.trainer.engine import WHOLE_MODEL, TrainEngine

TINY = TinyConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48, max_positions=64)
VOCAB = 23
OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=2, schedule="linear", clip_norm=0.5, weight_decay=0.01)


def build_model(folder):
    build_tiny(folder, tiny=TINY, vocab_size=VOCAB, eos_token_id=1, pad_token_id=0, seed=7)
    return str(folder)


def make_batch(num_groups, group_size, *, seed=0, prompt_len=5):
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
    loss_mask = np.concatenate(mask)
    return TokenBatch(
        tokens=np.concatenate(tokens), loss_mask=loss_mask,
        rollout_logprobs=np.where(loss_mask, np.log(1 / VOCAB) + 0.2 * rng.standard_normal(len(loss_mask)), 0),
        advantages=np.where(loss_mask, np.repeat(rng.standard_normal(len(lengths)), lengths), 0),
        loss_weights=loss_mask / loss_mask.sum(), offsets=np.concatenate([[0], np.cumsum(lengths)]),
        group_ids=np.array(group_ids), prefix_lens=np.full(len(lengths), prompt_len if group_size > 1 else 0))


def share(batch, *, rank, world, max_tokens=64, share_prefix=True):
    """One rank's part of a batch, and its micro-batches."""
    mine = plan_microbatches(batch, num_ranks=world, max_tokens=max_tokens, share_prefix=share_prefix).microbatches[rank]
    order = np.concatenate([np.empty(0, np.int64), *mine])
    bounds = np.cumsum([0, *(len(indices) for indices in mine)])
    return batch.select(order), [np.arange(low, high) for low, high in pairwise(bounds)]


def build_engine(groups, folder, *, algorithm=None, objective_name="ppo", optimizer=OPTIMIZER, lora=WHOLE_MODEL, **train):
    return TrainEngine.build(
        folder, config=TrainConfig(**train), algorithm=algorithm or AlgorithmConfig(), optimizer=optimizer, total_steps=10,
        groups=groups, objective_name=objective_name, lora=lora)


def train(engine, batches, *, max_tokens=64, share_prefix=True):
    """[loss, gradient norm] of one step per batch."""
    results = []
    for batch in batches:
        part, micros = share(batch, rank=engine.groups.rank, world=engine.groups.world, max_tokens=max_tokens, share_prefix=share_prefix)
        metrics = engine.train_step(part, [micros]).metrics
        results.append([metrics["train/loss"], metrics["train/grad_norm"]])
    return results


def temporary_model():
    """A folder that lives as long as the returned object, with a model in it; its path is `.name`."""
    folder = tempfile.TemporaryDirectory()
    build_model(Path(folder.name))
    return folder
