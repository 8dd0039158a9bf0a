"""The score step: forward passes over a batch before it is trained on, by the policy and by the models that it is compared with.

Called by the loop for algorithms that ask for it (`AlgorithmConfig.needs_scores`). The ranks score; values that depend on the scores are
computed here, over the whole batch, so that neither ranks nor micro-batches nor minibatches can change them.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from offbeat.algorithms.critic import with_end_targets
from offbeat.algorithms.distillation import teacher_stats, with_teacher
from offbeat.algorithms.experience import with_scores
from offbeat.algorithms.objectives import policy_loss
from offbeat.algorithms.selection import choose_tokens
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.controller.parts import RunParts
from offbeat.controller.teaching import RowOf
from offbeat.data.batch import Batch
from offbeat.ranks.trainers import Trainers
from offbeat.telemetry.tracker import StatsPart


@dataclass(frozen=True)
class ScoredBatch:
    """A batch of M targets with everything that its training step reads.

    For the record, `known` has `ref_logprobs` and `prox_logprobs`, [M] float32, where they were computed.
    """

    batch: Batch
    stats: StatsPart = field(default_factory=StatsPart)
    known: Mapping[str, np.ndarray] = field(default_factory=dict)


async def score_batch(batch: Batch, parts: RunParts, config: AlgorithmConfig, *, seed: int, row_of: RowOf) -> ScoredBatch:
    """Add what its training step reads to a batch of `make_batch`; `config` is of this step, and `seed` of random choices of tokens."""
    scores: dict[str, np.ndarray] = {}
    stats, trainers = StatsPart(), parts.trainers
    if config.compares_reference:
        scores["ref_logprobs"] = (await trainers.score(batch, of="reference")).columns["logprobs"]
    if parts.critic is not None:
        scores |= await _values(batch, parts.critic)
    batch = await asyncio.to_thread(with_scores, batch, scores, config)
    known = {name: values for name, values in scores.items() if name == "ref_logprobs"}
    if config.needs_teacher:
        assert parts.teacher is not None, "a run that needs a teacher has one"
        taught = await parts.teacher.score(batch, row_of)
        stats = await asyncio.to_thread(teacher_stats, batch, taught)
        batch = await asyncio.to_thread(with_teacher, batch, taught, config)
    if config.compares_targets:
        prox_logprobs = (await trainers.score(batch)).columns["logprobs"]
        known["prox_logprobs"] = prox_logprobs
        chosen = await asyncio.to_thread(choose_tokens, policy_loss(config), batch, prox_logprobs=prox_logprobs, seed=seed)
        batch = batch.with_columns(**chosen)
    return ScoredBatch(batch, stats, known)


async def _values(batch: Batch, critic: Trainers) -> dict[str, np.ndarray]:
    """Return `values` [M] float32 before each target, and `end_values` [N] float32 after sequences that were cut off."""
    scored, added = await asyncio.to_thread(with_end_targets, batch)
    values = (await critic.score(scored)).columns["values"]
    end_values = np.zeros(len(batch), np.float32)
    end_values[scored.target_sequences[added]] = values[added]
    return {"values": values[~added], "end_values": end_values}
