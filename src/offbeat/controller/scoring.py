"""The score step: forward passes over a batch before it is trained on, by the policy and by those that it is compared with.

Called by the loop for algorithms that ask for it (`AlgorithmConfig.needs_scores`). The ranks score; what follows from the scores is
computed here, over the whole batch, so that neither ranks nor micro-batches nor minibatches can change it.
"""

import numpy as np

from offbeat.algorithms.critic import with_end_targets
from offbeat.algorithms.experience import with_scores
from offbeat.algorithms.objectives import policy_loss
from offbeat.algorithms.selection import choose_tokens
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.batch import Batch
from offbeat.ranks.trainers import Trainers


async def score_batch(
    batch: Batch, trainers: Trainers, config: AlgorithmConfig, *, seed: int, critic: Trainers | None = None,
) -> Batch:
    """Return a batch of `make_batch` with everything that its training step reads; `seed` is of what is chosen at random."""
    scores: dict[str, np.ndarray] = {}
    if config.needs_reference:
        scores["ref_logprobs"] = (await trainers.score(batch, of="reference")).columns["logprobs"]
    if critic is not None:
        scores |= await _values(batch, critic)
    batch = with_scores(batch, scores, config)
    if config.compares_targets:
        prox_logprobs = (await trainers.score(batch)).columns["logprobs"]
        batch = batch.with_columns(**choose_tokens(policy_loss(config), batch, prox_logprobs=prox_logprobs, seed=seed))
    return batch


async def _values(batch: Batch, critic: Trainers) -> dict[str, np.ndarray]:
    """Return `values` [M] float32 before each target, and `end_values` [N] float32 after what was cut off."""
    scored, added = with_end_targets(batch)
    values = (await critic.score(scored)).columns["values"]
    end_values = np.zeros(len(batch), np.float32)
    end_values[scored.target_sequences[added]] = values[added]
    return {"values": values[~added], "end_values": end_values}
