"""Models beside the policy that are never trained: its reference, and its teacher."""

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.config.for_processes import RankConfig
from offbeat.config.train import TrainConfig
from offbeat.data.packing import PackedRow
from offbeat.model.divided_read import Divide
from offbeat.model.logprobs import dummy_row, token_logprobs
from offbeat.model.top import top_logprobs
from offbeat.pulse import progress
from offbeat.sync.mesh import ProcessGroups
from offbeat.trainer.messages import Dtype, ScoredShare, ScoreShare, TargetScores
from offbeat.trainer.policy import autocast, load_policy, row_of
from offbeat.trainer.strategies import Strategy, load


def load_frozen(
    folder: str, *, config: TrainConfig, groups: ProcessGroups, dtype: Dtype = "float32", float32_head: bool = False,
    images: Path | None = None,
) -> Strategy:
    """Load a model that only scores, in shards if the policy is; no gradient ever reaches it. Collective.

    `folder` is a Hugging Face folder or hub id, the same on all ranks; `float32_head` and `images` are as for `load_policy`.
    """
    unchecked = config.model_copy(update={"gradient_checkpointing": "off", "freeze": ()})

    def read(divide: Divide | None) -> PreTrainedModel:
        return load_policy(
            folder, config=unchecked, dtype=dtype, divide=divide, float32_head=float32_head, images=images).requires_grad_(False)

    return load(read, groups=groups, precision=config.computes_in, trained=False, compiles=config.compile)[1]


class TeacherModel:
    """The model of [teacher] on one rank. It only scores, in the way of `Trainer.score`: it has no optimizer and nothing to save."""

    def __init__(self, config: RankConfig, groups: ProcessGroups) -> None:
        """Load the model; collective."""
        progress("load_teacher")
        self.groups = groups
        self._config = config
        self._strategy = load_frozen(config.teacher.path, config=config.train, groups=groups, dtype=config.model.number_format,
            float32_head=config.algorithm.float32_head)

    def score(self, request: ScoreShare) -> ScoredShare:
        """Score a batch's targets at the temperature of the samples; collective.

        Returns:
            `logprobs` of the targets; with `teacher.top_k` = K also, for each i < K, `top_tokens_i` and `top_logprobs_i`, [M] float32 each:
            the id and the log-probability of the i-th likeliest token in each target's place. Ids up to 2^24 are exact.
        """
        start_s, batch, config = time.time(), request.batch, self._config.train
        columns: dict[str, np.ndarray] = {name: np.zeros(batch.num_targets, np.float32) for name in self._names()}
        with self.groups.sync.region("teach"):
            for indices in request.microbatches:
                row = row_of(batch, indices, share_prefix=config.share_prefix)
                progress("forward")
                with self._strategy.scoring(), autocast(config, self._strategy.forward):
                    found = self._scores(row if len(row) else dummy_row())
                for name, values in found.items():
                    columns[name][row.batch_index] = values.cpu().numpy()
        return ScoredShare(request.sequences, TargetScores(columns), start_s, time.time())

    def _names(self) -> list[str]:
        return ["logprobs", *(f"top_{what}_{i}" for what in ("tokens", "logprobs") for i in range(self._config.teacher.top_k))]

    def _scores(self, row: PackedRow) -> Mapping[str, Tensor]:
        """Return [M] float32 each, for the targets of a row, by name."""
        temperature, top_k = self._config.rollout.temperature or 1.0, self._config.teacher.top_k
        if not top_k:
            return {"logprobs": token_logprobs(self._strategy.forward, row, temperature=temperature)}
        top = top_logprobs(self._strategy.forward, row, top_k=top_k, temperature=temperature)
        columns = [top.logprobs, *top.top_tokens.float().unbind(1), *top.top_logprobs.unbind(1)]
        return dict(zip(self._names(), columns, strict=True))
