"""Time of a rank's share of a training step in seconds, a L + b L² + c, estimated from the model's sizes and fitted to measured times.

`data/packing.py` balances by it, and `ranks/sharding.py` passes it the times of the ranks. Numpy only.

*Work* is an array [..., 2] float64 of row tokens and attention squares. A run of n tokens behind a prefix of p tokens has n² + 2np
squares, twice the number of its pairs of attending tokens; 2 tokens behind 3, for example, are the work [2, 16]. So a sequence of L tokens
has L² squares, however it is cut into a prefix and a run, and a shared prompt counts once. Work is additive: over the runs of a unit, and
over the units of a rank.
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
# Scales of error before any measurement: linear and quadratic coefficients differ by this share of the larger one, the constant is this
# share of a step, and measured times have this relative noise. A ridge is weighted by noise squared over the square of one of the first
# two.
_RATIO_ERROR = 0.7
_CONSTANT_ERROR = 0.5
_NOISE = 0.1


@dataclass(frozen=True)
class CostModel:
    """Seconds per rank and step: `linear` per row token, `quadratic` per attention square, and `constant`, which no split can change.

    Raises DataError if a coefficient is negative or not finite.
    """

    linear: float
    quadratic: float
    constant: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (np.isfinite(value) and value >= 0):
                raise DataError(f"CostModel.{name} must be finite and not negative, got {value}")

    def load(self, work: np.ndarray) -> np.ndarray:
        """Return the [...] seconds of [..., 2] work, without the constant: balancing spreads these. [N, 2] work gives [N]."""
        return work @ np.array([self.linear, self.quadratic])


TOKENS = CostModel(1.0, 0.0)
"""Cost model that balances by row tokens alone."""


def run_work(lengths: Sequence[int] | np.ndarray | int, prefix_lengths: Sequence[int] | np.ndarray | int = 0) -> np.ndarray:
    """Compute the work, [..., 2] float64, of runs of tokens, each behind a prefix that it does not compute itself.

    Args:
        lengths: [...] integer, tokens of each run, e.g. [N], whose work is [N, 2].
        prefix_lengths: [...] integer, tokens of each prefix, or one number for all.
    """
    n = np.asarray(lengths, dtype=np.float64)
    return np.stack([n, n * (n + 2 * np.asarray(prefix_lengths, dtype=np.float64))], axis=-1)


@dataclass(frozen=True)
class ForwardFlops:
    """Floating-point operations of a forward pass: of products with weights per row token, of attention per attention square."""

    per_token: float
    per_square: float

    def of_pass(self, work: np.ndarray, *, learns: bool, frozen: bool = False) -> float:
        """Return the operations of `work` [2], such as one row of an [R, 2] work.

        Args:
            learns: whether there is a backward pass, which takes two products for each one of the forward pass.
            frozen: whether weights have no gradients, which leaves one of these two.
        """
        products = (2 if frozen else 3) if learns else 1
        return float(products * self.per_token * work[0] + (3 if learns else 1) * self.per_square * work[1])


def forward_flops(model_config: Mapping[str, Any]) -> ForwardFlops:
    """Count the operations of a model's forward pass from its sizes.

    Two for each weight of a matrix, embeddings apart, and token; and four (two for scores, two for values) for each head dimension and pair
    of attending tokens, which is half a square. Feed-forward layers are taken to have three matrices, as those with a gate have.

    Args:
        model_config: contents of a config.json, or of its `text_config` if it has one. In a mixture of experts, only the experts that one
            token visits count. Missing sizes are guessed: width 2048, 24 layers, heads of 128, as many key as query heads, 8 width²
            parameters in a feed-forward layer, no output head. Sliding windows and compressed keys are ignored.

    Source: PaLM, arXiv:2204.02311, appendix B, with half of its attention, since that is causal.
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
    return ForwardFlops(2.0 * weights, 4 * layers * heads * head_dim / 2)


def prior(model_config: Mapping[str, Any]) -> CostModel:
    """Estimate the cost of a forward and backward pass by `forward_flops`, before anything is measured.

    Its coefficients are meaningful only as a ratio, because the speed of the device is unknown. The constant is 0.
    """
    flops = forward_flops(model_config)
    return CostModel(3 * flops.per_token / _NOMINAL_FLOPS_PER_S, 3 * flops.per_square / _NOMINAL_FLOPS_PER_S)


class CostFit:
    """Fits a cost model to measured times: least squares of the *relative* error, so that one slow step has little influence.

    The weight of old steps decays by 5 % per step. Where the times carry no information (after good balancing all ranks have similar
    loads), a weak ridge keeps linear and quadratic in the prior's ratio and the constant at 0. Coefficients are never negative. The first
    step, which includes warming up, gets little weight. `model` is the prior until something was measured.
    """

    def __init__(self, prior: CostModel) -> None:
        self.model = prior
        self._prior = prior
        self._scale = 0.0  # the larger of the fitted coefficients, in units of the prior's; 0 for not fitted yet
        self._variance = _NOISE**2  # of the relative error
        # Sums over rows (prior's seconds for tokens, for squares, and 1) / measured seconds, which the coefficients should map to 1.
        self._gram = np.zeros((3, 3))
        self._sum = np.zeros(3)
        self._weight = 0.0

    def observe(self, work: np.ndarray, busy_s: Sequence[float] | np.ndarray) -> None:
        """Learn from one step.

        Args:
            work: [R, 2] float64, work of each rank.
            busy_s: [R] seconds that each rank computed, without waiting; times below a microsecond are ignored.

        Raises:
            DataError: the number of times is not R, or a time is negative or not finite.
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
        if candidate.load(work).any():  # times that do not grow with the work carry no information
            self.model, self._scale = candidate, float(fitted[:2].max())
            squared_error = fitted @ self._gram @ fitted - 2 * self._sum @ fitted + self._weight
            self._variance = float(max(squared_error, 0.0) + _NOISE**2) / (self._weight + 1)

    def _ridge(self) -> np.ndarray:
        """Return the ridge penalty [3, 3] for the coefficients: linear, quadratic, constant.

        It is (linear - quadratic)² relative to the square of the larger, and constant² relative to the square of the mean time. The larger
        one is the fitted one, so that a prior that is wrong by orders of magnitude weighs no more than one that is half wrong.
        """
        both, apart = np.array([1.0, 1.0, 0.0]), np.array([1.0, -1.0, 0.0])
        scale = self._scale or (both @ self._sum) / (both @ self._gram @ both)
        ridge = np.outer(apart, apart) / (_RATIO_ERROR * scale) ** 2
        ridge[2, 2] = self._gram[2, 2] / self._weight / _CONSTANT_ERROR**2
        return self._variance * ridge


def _size(config: Mapping[str, Any], *names: str, default: int) -> int:
    """Return the first of `names` that the configuration has as a positive integer."""
    return next((value for name in names if isinstance(value := config.get(name), int) and value > 0), default)


def _non_negative_minimum(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Return the x >= 0, [K], that minimises x' matrix x - 2 vector' x, by trying every set of positive coordinates; matrix is [K, K]."""
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
