"""The score step: forward passes over a batch before it is trained on, by the policy and by those that it is compared with.

Called by the loop for algorithms that ask for it (`AlgorithmConfig.needs_scores`). The ranks score; what follows from the scores is
computed here, over the whole batch, so that neither ranks nor micro-batches nor minibatches can change it.
"""

import numpy as np

from offbeat.algorithms.distillation import teacher_stats, with_teacher
from offbeat.algorithms.experience import with_scores
from offbeat.algorithms.objectives import policy_loss
from offbeat.algorithms.selection import choose_tokens
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.controller.teaching import RowOf, Teacher
from offbeat.data.batch import Batch
from offbeat.ranks.trainers import Trainers
from offbeat.telemetry.tracker import StatsPart


async def score_batch(
    batch: Batch, trainers: Trainers, config: AlgorithmConfig, *, teacher: Teacher | None, row_of: RowOf,
) -> tuple[Batch, StatsPart]:
    """Return a batch of `make_batch` with everything that its training step reads, and statistics of the scores.

    Args:
        teacher: scores if `config.needs_teacher`.
        row_of: gives the row of a group id.
    """
    scores: dict[str, np.ndarray] = {}
    stats = StatsPart()
    if config.compares_reference:
        scores["ref_logprobs"] = (await trainers.score(batch, of="reference")).columns["logprobs"]
    batch = with_scores(batch, scores, config)
    if config.needs_teacher:
        assert teacher is not None, "a run that needs a teacher has one"
        taught = await teacher.score(batch, row_of)
        stats = teacher_stats(batch, taught)
        batch = with_teacher(batch, taught, config)
    if config.compares_targets:
        prox_logprobs = (await trainers.score(batch)).columns["logprobs"]
        batch = batch.with_columns(m2_mask=choose_tokens(policy_loss(config), batch, prox_logprobs=prox_logprobs))
    return batch, stats
