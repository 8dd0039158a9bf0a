"""What a rank's share of a training step takes, in seconds: a L + b L² + c, guessed from the model's sizes and fitted to measured times.

`data/packing.py` balances by it, `cluster/shards.py` feeds it what each rank measured. Numpy only.

*Work* is an array [..., 2] float64 of row tokens and attention squares. A run of n tokens behind a prefix of p tokens has n² + 2np squares,
twice its pairs of tokens that look at one another. So a sequence of L tokens has L² of them, however it is cut into a prefix and a run, and
a shared prompt counts once. Work adds up: runs to units, units to ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from offbeat.errors import DataError

_NOMINAL_FLOPS_PER_S = 1e12
_FORGETTING = 0.95
_FIRST_STEP_WEIGHT = 0.01
_SHORTEST_S = 1e-6
# How wrong the guess before any measurement may be: linear and quadratic apart by this share of the larger, the constant by this share of
# a step, and the noise of a measured time. A ridge weighs as much as the noise, squared, by the first two.
_RATIO_ERROR = 0.7
_CONSTANT_ERROR = 0.5
_NOISE = 0.1


@dataclass(frozen=True)
class CostModel:
    """Seconds per rank and step: `linear` per row token, `quadratic` per attention square, and `constant`, which no split can change.

    Raises:
        DataError: a coefficient is negative or not finite.
    """

    linear: float
    quadratic: float
    constant: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (np.isfinite(value) and value >= 0):
                raise DataError(f"CostModel.{name} must be finite and not negative, got {value}")

    def load(self, work: np.ndarray) -> np.ndarray:
        """[..., 2] work to [...] seconds, without the constant: what balancing spreads."""
        return work @ np.array([self.linear, self.quadratic])


TOKENS = CostModel(1.0, 0.0)
"""Balances by row tokens."""


def run_work(lengths: Sequence[int] | np.ndarray | int, prefix_lengths: Sequence[int] | np.ndarray | int = 0) -> np.ndarray:
    """Work of runs of tokens, each behind a prefix that it does not compute itself.

    Args:
        lengths: [...] tokens of each run.
        prefix_lengths: [...], or one for all.

    Returns:
        [..., 2] float64.
    """
    n = np.asarray(lengths, dtype=np.float64)
    return np.stack([n, n * (n + 2 * np.asarray(prefix_lengths, dtype=np.float64))], axis=-1)


def prior(model_config: Mapping[str, Any]) -> CostModel:
    """The cost that a model's sizes suggest, from floating-point operations, before anything was measured.

    Args:
        model_config: contents of a config.json. Where it has a `text_config`, that counts. Of a mixture of experts, those that one token
            visits count. A size that it does not name is guessed: width 2048, 24 layers, heads of 128, as many key as query heads, 8 width²
            parameters in a feed-forward layer, no output head. Windows and compressed keys are not looked at.

    Returns:
        Only the ratio of its coefficients means something: the speed of the device is unknown. The constant is 0.
    """
    config = model_config.get("text_config") or model_config
    hidden = _size(config, "hidden_size", "n_embd", "d_model", default=2048)
    layers = _size(config, "num_hidden_layers", "n_layer", default=24)
    heads = _size(config, "num_attention_heads", "n_head", default=max(hidden // 128, 1))
    head_dim = _size(config, "head_dim", default=max(hidden // heads, 1))
    kv_heads = _size(config, "num_key_value_heads", default=heads)
    ffn = _size(config, "num_experts_per_tok", default=1) * _size(
        config, "moe_intermediate_size", "intermediate_size", default=8 * hidden // 3)
    ffn += _size(config, "shared_expert_intermediate_size", default=0)
    weights = layers * hidden * (2 * head_dim * (heads + kv_heads) + 3 * ffn) + hidden * _size(config, "vocab_size", default=0)
    # Forward and backward make three passes. Each takes two operations per weight and token; and four per pair, which is half a square,
    # and head dimension: two for scores, two for values.
    linear, quadratic = 3 * 2 * weights, 3 * 4 * layers * heads * head_dim / 2
    return CostModel(linear / _NOMINAL_FLOPS_PER_S, quadratic / _NOMINAL_FLOPS_PER_S)


class CostFit:
    """Keeps a cost model true to what ranks measure: least squares of the *relative* error, so that a slow step pulls little.

    Old steps are forgotten at 5 % per step. Where the times cannot tell (after good balancing all ranks have like loads) a weak ridge keeps
    linear and quadratic in the prior's ratio and the constant at 0. Coefficients are never negative. The first step, which pays for
    warming up, counts for little.

    Attributes:
        model: the present cost model; the prior until something was measured.
    """

    def __init__(self, prior: CostModel) -> None:
        self.model = prior
        self._prior = prior
        self._scale = 0.0  # the larger of the fitted coefficients, in units of the prior's; 0 for not fitted yet
        self._variance = _NOISE**2  # of the relative error
        # Of rows (seconds by the prior for tokens, for squares, and 1) / measured seconds, which the coefficients should map to 1.
        self._gram = np.zeros((3, 3))
        self._sum = np.zeros(3)
        self._weight = 0.0

    def observe(self, work: np.ndarray, busy_s: Sequence[float] | np.ndarray) -> None:
        """Learn from one step.

        Args:
            work: [R, 2] of each rank.
            busy_s: [R] seconds that each rank computed, waiting left out; one below a microsecond is passed over.

        Raises:
            DataError: not one time per rank, or a time is negative or not finite.
        """
        seconds = np.asarray(busy_s, dtype=np.float64)
        if seconds.shape != work.shape[:1] or not (np.isfinite(seconds) & (seconds >= 0)).all():
            raise DataError(f"busy_s must be {len(work)} finite times, none negative, got {list(busy_s)}")
        used = seconds >= _SHORTEST_S
        if not work[used].any():
            return
        parts = work[used] * [self._prior.linear, self._prior.quadratic]
        rows = np.column_stack([parts, np.ones(len(parts))]) / seconds[used, None]
        weight = 1.0 if self._weight else _FIRST_STEP_WEIGHT
        self._gram = _FORGETTING * self._gram + weight * rows.T @ rows
        self._sum = _FORGETTING * self._sum + weight * rows.sum(axis=0)
        self._weight = _FORGETTING * self._weight + weight * len(rows)
        fitted = _non_negative_minimum(self._gram + self._ridge(), self._sum)
        candidate = CostModel(float(fitted[0]) * self._prior.linear, float(fitted[1]) * self._prior.quadratic, float(fitted[2]))
        if candidate.load(work).any():  # times that do not grow with the work say nothing of its cost
            self.model, self._scale = candidate, float(fitted[:2].max())
            squared_error = fitted @ self._gram @ fitted - 2 * self._sum @ fitted + self._weight
            self._variance = float(max(squared_error, 0.0) + _NOISE**2) / (self._weight + 1)

    def _ridge(self) -> np.ndarray:
        """What holds the coefficients: (linear - quadratic)² by the square of the larger, and constant² by that of the mean time.

        By the larger as fitted so far, so that a prior that is wrong by orders of magnitude weighs no more than one that is half wrong.
        """
        both, apart = np.array([1.0, 1.0, 0.0]), np.array([1.0, -1.0, 0.0])
        scale = self._scale or (both @ self._sum) / (both @ self._gram @ both)
        ridge = np.outer(apart, apart) / (_RATIO_ERROR * scale) ** 2
        ridge[2, 2] = self._gram[2, 2] / self._weight / _CONSTANT_ERROR**2
        return self._variance * ridge


def _size(config: Mapping[str, Any], *names: str, default: int) -> int:
    """The first of `names` that is there as a positive number."""
    return next((value for name in names if isinstance(value := config.get(name), int) and value > 0), default)


def _non_negative_minimum(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least x' matrix x - 2 vector' x, by trying every set of coordinates that may be above 0."""
    scale = 1 / np.sqrt(np.where(np.diag(matrix) > 0, np.diag(matrix), 1.0))
    matrix, vector = matrix * np.outer(scale, scale), vector * scale
    best, least = np.zeros(len(vector)), 0.0
    for size in range(1, len(vector) + 1):
        for free in map(list, combinations(range(len(vector)), size)):
            x = np.zeros(len(vector))
            x[free] = np.linalg.lstsq(matrix[np.ix_(free, free)], vector[free], rcond=None)[0]
            value = x @ matrix @ x - 2 * vector @ x
            if (x >= 0).all() and value < least:
                best, least = x, value
    return best * scale
