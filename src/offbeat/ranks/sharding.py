"""Spreads each training step's batch over the ranks, and learns from their times to spread the next one better.

Used wherever a whole batch is available: by `WorkerRanks` in the controller, by rank 0 in SPMD mode. Torch-free, without I/O: the caller
hands out the shards and returns the times. Spreading changes no loss or gradient, because every denominator is in the loss weights.
"""

import threading
from collections.abc import Sequence
from typing import Self, TypeVar

import numpy as np

from offbeat.algorithms.adam import AdamParams
from offbeat.algorithms.experience import split_minibatches
from offbeat.algorithms.objectives import keeps_groups
from offbeat.config.for_processes import RankConfig
from offbeat.data.batch import Batch
from offbeat.data.cost import CostFit, CostModel, prior
from offbeat.data.model_folder import read_model_config
from offbeat.data.packing import Plan, plan_microbatches
from offbeat.trainer.messages import Policy, ScoreShare, TrainStep

T = TypeVar("T")


class Sharder:
    """Per training step: `shards`, then `observe` once all ranks are done. A step that failed is not observed.

    The shares of the next step may be asked for `ahead`, on a thread, while ranks train: they are balanced without the times of the step
    in training, also where that is observed meanwhile.

    With `rollout.balance_batch`, ranks get shares of similar predicted cost; numbers of sequences may differ, and a rank may get none.
    Without it, groups are dealt in their order. `balanced_by` is the cost model by which the step that was observed last was balanced.
    """

    def __init__(self, config: RankConfig, *, num_ranks: int, prior: CostModel) -> None:
        """`prior` is the cost model until times are known. Ranks of the same rows, such as 0 and 1 with tp = 2, get the same share."""
        self._train = config.train
        self._balance = config.rollout.balance_batch
        self._ranks_per_share = config.train.parallel.ranks_per_share
        self._num_shares = num_ranks // self._ranks_per_share
        self._fit = CostFit(prior)
        self._given: CostModel | None = None
        self.balanced_by = prior
        self._planned: list[tuple[CostModel, list[Plan]]] = []
        """The step in training, and maybe the next one, each with the model that it was balanced by."""
        self._lock = threading.Lock()

    @classmethod
    def of(cls, config: RankConfig, *, model: str, num_ranks: int) -> Self:
        """Start with the prior of a model's configuration; raises as `read_model_config`."""
        return cls(config, num_ranks=num_ranks, prior=prior(read_model_config(model)))

    @property
    def cost(self) -> CostModel:
        """The cost model that the next step is balanced by."""
        return self._given or self._fit.model

    def balance_by(self, cost: CostModel | None) -> None:
        """Balance by this cost model from now on, so that a step computed again gets the same shares; None is the fitted one."""
        self._given = cost

    def shards(self, batch: Batch, params: AdamParams, *, num_minibatches: int, seed: int, ahead: bool = False) -> list[TrainStep]:
        """Return every rank's share, cut into micro-batches within the token budget, equally many on every rank.

        Args:
            batch: may be empty; a rank without sequences gets empty micro-batches.
            num_minibatches: number of optimizer steps; fewer if there are fewer groups.
            seed: seed of the deal into minibatches.
            ahead: whether this is the step after the one in training, which is observed before this one.

        Raises:
            DataError: a single sequence, or a group that must stay whole, exceeds the budget.
        """
        minibatches = split_minibatches(batch, num_minibatches, seed=seed)
        cost = self.cost  # which `observe` may change meanwhile
        plans = [self._plan(minibatch, cost) for minibatch in minibatches]
        with self._lock:
            self._planned = [*(self._planned[:1] if ahead else []), (cost, plans)]
        planned = list(zip(minibatches, plans, strict=True))
        return self._to_ranks([
            TrainStep(*_cut([(minibatch, plan.microbatches[number]) for minibatch, plan in planned]), params)
            for number in range(self._num_shares)])

    def score_shares(self, batch: Batch, *, of: Policy, with_entropy: bool) -> list[ScoreShare]:
        """Return every rank's share of a batch that is scored, in the micro-batches that a training step of one minibatch has.

        Raises:
            DataError: a single sequence, or a group that must stay whole, exceeds the budget.
        """
        shares = []
        for microbatches in self._plan(batch, self.cost).microbatches:
            part, (own,) = _cut([(batch, microbatches)])
            shares.append(ScoreShare(part, np.concatenate(microbatches), own, of, with_entropy))
        return self._to_ranks(shares)

    def observe(self, busy_s: Sequence[float]) -> dict[str, float]:
        """Fit the cost model to the oldest step of `shards` that was not observed, and return metrics of that step.

        `busy_s` are the [R] seconds that each rank computed, excluding waits for others, such as [2.1, 1.9].

        Returns:
            balance/gap: busiest rank's predicted load over the lower bound of any split of the same units, less 1.
            balance/cov_before, balance/cov_after: standard deviation of predicted loads over ranks by their mean, had the groups been
                dealt in their order, and as they were spread.
            balance/predicted_gain: predicted time of the step with groups in their order, over its predicted time as spread.
            balance/lost_s: busiest rank's measured seconds less the mean of all.

        Raises:
            DataError: there is not one finite, non-negative time for each rank.
        """
        assert self._planned, "observe follows shards"
        with self._lock:
            (cost, plans), *self._planned = self._planned
        self.balanced_by = cost
        # The ranks of a share compute it together, so it takes as long as the busiest of them.
        busy_s = np.reshape(busy_s, (-1, self._ranks_per_share)).max(axis=1).tolist()
        self._fit.observe(sum((plan.work for plan in plans), np.zeros((self._num_shares, 2))), busy_s)
        # [K, R]: each minibatch ends with a wait for the busiest rank.
        before, after = (cost.load(np.stack(work)) for work in ([p.work_in_order for p in plans], [p.work for p in plans]))
        bound = sum(plan.lower_bound for plan in plans)
        largest, largest_before = float(after.max(axis=1).sum()), float(before.max(axis=1).sum())
        return {
            "balance/gap": largest / bound - 1 if bound else 0.0,
            "balance/cov_before": _variation(before),
            "balance/cov_after": _variation(after),
            "balance/predicted_gain": (largest_before + cost.constant) / (largest + cost.constant) if largest else 1.0,
            "balance/lost_s": max(busy_s) - sum(busy_s) / len(busy_s),
        }

    def _to_ranks(self, shares: Sequence[T]) -> list[T]:
        return [share for share in shares for _ in range(self._ranks_per_share)]

    def _plan(self, batch: Batch, cost: CostModel) -> Plan:
        return plan_microbatches(
            batch, num_ranks=self._num_shares, max_tokens=self._train.max_tokens_per_microbatch, share_prefix=self._train.share_prefix,
            whole_groups=keeps_groups(batch), cost=cost, balance=self._balance)


def _cut(minibatches: Sequence[tuple[Batch, list[np.ndarray]]]) -> tuple[Batch, tuple[tuple[np.ndarray, ...], ...]]:
    """Return one rank's share of all minibatches, and each one's micro-batches as indices into its sequences, in order of use.

    Indices are [N] int64, N sequences of one micro-batch. For example, micro-batches of 2 and 1 sequences give ([0, 1], [2]).
    """
    parts, steps, start = [], [], 0
    for minibatch, microbatches in minibatches:
        parts.append(minibatch.select(np.concatenate(microbatches)))
        ends = start + np.cumsum([len(micro) for micro in microbatches])
        steps.append(tuple(np.arange(end - len(micro), end) for micro, end in zip(microbatches, ends, strict=True)))
        start += len(parts[-1])
    return parts[0] if len(parts) == 1 else Batch.concatenate(parts), tuple(steps)


def _variation(loads_KR: np.ndarray) -> float:
    mean = loads_KR.mean()
    return float(loads_KR.std(axis=1).mean() / mean) if mean else 0.0
