"""A teacher's scores as advantages of the sampled tokens, or its likeliest tokens as targets in their place. Numpy only.

Called by the score step, over the whole batch; metrics are collected over each process's own part of it.

Source: 2306.13649 (GKD); one-sample form, https://thinkingmachines.ai/blog/on-policy-distillation.
"""

from dataclasses import dataclass, replace

import numpy as np

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.objectives import objective_of
from offbeat.data.batch import Batch
from offbeat.telemetry.tracker import StatsPart, StatsTracker

_MAX_LOG_RATIO = 20.0  # as in `losses.ratios`
_UNLIKELY = -10.0


@dataclass(frozen=True, eq=False)
class TeacherScores:
    """A teacher's log-probabilities of the M targets of N sequences.

    Attributes:
        logprobs: [M] float32, of the targets; not finite where unknown.
        too_long: [N] bool, the sequences that were not scored because they do not fit into the teacher's context.
        top_tokens, top_logprobs: [M, K] int32 and float32, the likeliest tokens in each target's place, with a log-probability of minus
            infinity where there are fewer than K; K is 0 where only the targets were scored.
    """

    logprobs: np.ndarray
    too_long: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def of_targets(cls, logprobs: np.ndarray, too_long: np.ndarray) -> "TeacherScores":
        """Return scores without likeliest tokens; [M] float32 and [N] bool."""
        return cls(logprobs, too_long, np.zeros((len(logprobs), 0), np.int32), np.zeros((len(logprobs), 0), np.float32))

    @property
    def renormalised(self) -> np.ndarray:
        """[M, K] float64, logarithms of the probabilities of the likeliest tokens divided by their sum; minus infinity of none."""
        top = self.top_logprobs.astype(np.float64)
        finite = np.isfinite(top)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(finite, top - np.log(np.where(finite, np.exp(top), 0.0).sum(axis=1, keepdims=True)), -np.inf)


def with_teacher(batch: Batch, scores: TeacherScores, config: AlgorithmConfig) -> Batch:
    """Return a batch of `make_batch` with the teacher's scores as its advantages or targets.

    With an objective that reads advantages, the advantage of a target is `config.teacher_coefficient` times teacher's less rollout's
    log-probability, limited to +-20, alone or added to the task's: e.g. -3.0 less -2.0 gives -1.0 with a coefficient of 1. A target is left
    out, with an advantage of 0, where one of the two is not finite. Otherwise the teacher's likeliest tokens replace each target, with
    their renormalised log-probabilities as the column `teacher_logprobs`, for reverse_kl the least of them as `teacher_least`, and the loss
    weight of the target; a target is dropped where the teacher gave none.
    """
    objective = objective_of(config.objective)
    if objective.asks_teacher:
        return _of_top_tokens(batch, scores, with_least="teacher_least" in objective.reads)
    log_ratios = _log_ratios(batch, scores)
    known = np.isfinite(log_ratios)
    task = batch.columns["advantages"] if config.teacher_credit == "added" else 0.0
    own = config.teacher_coefficient * np.where(known, log_ratios, 0.0)
    return batch.with_columns(advantages=np.where(known, task + own, 0.0).astype(np.float32))


def teacher_stats(batch: Batch, scores: TeacherScores) -> StatsPart:
    """Collect, of a batch before `with_teacher` changes it:

    teacher/reverse_kl_mean: mean of rollout's less teacher's log-probability, an estimate of KL(rollout || teacher) in nats.
    teacher/unlikely_share: share of targets with a log-probability under the teacher below -10.
    teacher/missing_share: share of targets that are left out.
    teacher/too_long_share: share of sequences that do not fit into the teacher's context.
    teacher/top_entropy_mean: mean entropy of the renormalised likeliest tokens in nats, if there are any.
    """
    log_ratios = _log_ratios(batch, scores)
    known = np.isfinite(log_ratios)
    tracker = StatsTracker()
    with tracker.scope("teacher"):
        tracker.stat(
            reverse_kl_mean=-log_ratios[known], unlikely_share=scores.logprobs[known] < _UNLIKELY, missing_share=~known,
            too_long_share=scores.too_long)
        if scores.top_logprobs.shape[1]:
            logs = scores.renormalised
            logs = logs[np.isfinite(logs).any(axis=1)]
            tracker.stat(top_entropy_mean=-(np.exp(logs) * np.where(np.isfinite(logs), logs, 0.0)).sum(axis=1))
    return tracker.take()


def _log_ratios(batch: Batch, scores: TeacherScores) -> np.ndarray:
    """Return [M] float64, log(teacher / rollout) within +-20; NaN where one of them is not finite."""
    teacher, rollout = scores.logprobs.astype(np.float64), batch.columns["rollout_logprobs"].astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(teacher) & np.isfinite(rollout), np.clip(teacher - rollout, -_MAX_LOG_RATIO, _MAX_LOG_RATIO), np.nan)


def _of_top_tokens(batch: Batch, scores: TeacherScores, *, with_least: bool) -> Batch:
    known = np.isfinite(_log_ratios(batch, scores))
    logs = np.where(known[:, None], scores.renormalised, -np.inf)
    which, rank = np.nonzero(np.isfinite(logs))  # by target, so that positions rise
    columns = {"loss_weights": batch.columns["loss_weights"][which], "teacher_logprobs": logs[which, rank].astype(np.float32)}
    if with_least:
        columns["teacher_least"] = np.where(np.isfinite(logs), logs, np.inf).min(axis=1)[which].astype(np.float32)
    return replace(batch, positions=batch.positions[which], targets=scores.top_tokens[which, rank], columns=columns, supports=None)
