"""Decides whether an epoch draws a row of a dataset, by the rewards of its last group. Pure; called by `PromptStream`.

A row of a pool with weight w is drawn if its random number for the epoch, which depends on seed, epoch and row alone, is below w; so it
comes in a share w of epochs, e.g. in one of four with a weight of 0.25. A row whose pass rate reached `curriculum.leave_at` has left, until
all have. The row's own last settled group decides, not the order in which groups finish, unless a row's turn comes while its group of the
epoch before still runs: then the group before that one counts.

Source: difficulty pools, prime-rl; no-positive-resampling, ScaleRL, arXiv:2510.13786.
"""

from dataclasses import dataclass, field

import numpy as np

from offbeat.config.curriculum import CurriculumConfig
from offbeat.data.reward import RIGHT
from offbeat.telemetry.tracker import StatsPart

_POOLS = ("hard", "normal", "easy", "unseen")


@dataclass(frozen=True)
class CurriculumState:
    """Results of the rows of a dataset.

    Attributes:
        means: mean reward of the last group of each row that has had one, by index, such as {3: 0.25, 17: 1.0}.
        left: indices of the rows that have left, ascending.
    """

    means: dict[int, float] = field(default_factory=dict)
    left: tuple[int, ...] = ()


class Curriculum:
    """Remembers the results of the rows of a dataset, and decides which of them an epoch draws."""

    def __init__(self, config: CurriculumConfig, *, num_rows: int, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._weights = np.array([config.hard_weight, config.normal_weight, config.easy_weight, config.unseen_weight])
        self._means = np.full(num_rows, np.nan)  # [num_rows] float64, NaN where a row has had no group
        self._left = np.zeros(num_rows, np.bool_)
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Give every row its random number for the epoch. If all rows have left, all return."""
        self._chances = np.random.default_rng([self._seed, epoch, 1]).random(len(self._means))
        if self._left.all():
            self._left[:] = False

    def draws(self, index: int) -> bool:
        """Whether the epoch draws this row."""
        if self._left[index]:
            return False
        return not self._config.pools or bool(self._chances[index] < self._weights[self._pools(self._means[index])])

    def note(self, index: int, rewards: np.ndarray) -> None:
        """Remember the rewards, [G] and finite, of the usable samples of a row's group; none leaves all as it was."""
        if len(rewards):
            self._means[index] = rewards.mean(dtype=np.float64)
            self._left[index] = 0 < self._config.leave_at <= np.mean(rewards >= RIGHT)

    def state(self) -> CurriculumState:
        seen = np.flatnonzero(np.isfinite(self._means))
        means = dict(zip(seen.tolist(), self._means[seen].tolist(), strict=True))
        return CurriculumState(means, tuple(np.flatnonzero(self._left).tolist()))

    def restore(self, state: CurriculumState) -> None:
        """Replace the results by those of `state`, of a curriculum over the same rows."""
        self._means[:], self._left[:] = np.nan, False
        self._means[list(state.means)] = list(state.means.values())
        self._left[list(state.left)] = True

    def stats(self) -> StatsPart:
        """Return the number of rows in each pool, without those that have left, and the share that has left."""
        counts = np.bincount(self._pools(self._means[~self._left]), minlength=len(_POOLS))
        return StatsPart(
            sums={f"curriculum/{pool}_prompts": float(count) for pool, count in zip(_POOLS, counts, strict=True)},
            means={"curriculum/left_share": (float(self._left.sum()), float(len(self._left)))})

    def _pools(self, means: np.ndarray) -> np.ndarray:
        """Return positions in `_POOLS`, [K] int64, of rows with these mean rewards [K]."""
        seen = np.where(means <= self._config.hard_up_to, 0, np.where(means <= self._config.normal_up_to, 1, 2))
        return np.where(np.isnan(means), _POOLS.index("unseen"), seen)
