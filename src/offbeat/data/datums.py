"""A batch for losses that are sums over targets: sequences back to back, and at each of their positions any number of targets.

Unlike in a `TokenBatch`, what a position is to predict need not be the next token, and each sequence has a loss of its own, so that one
batch may hold the work of many tenants. Made by services, cut into shares by `cluster`, computed by the trainer. Plain numpy.

A worked example, one sequence [7, 8, 9] that is to predict 8, then 5 or 6, and nothing at its end:

    tokens          [7, 8, 9]
    target_offsets  [0, 1, 3, 3]    position i has the targets target_offsets[i]:target_offsets[i + 1]
    targets         [8, 5, 6]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np

from offbeat.data.batch import gather_ranges
from offbeat.errors import DataError


class LossKind(NamedTuple):
    """What a loss reads.

    Attributes:
        inputs: fields of a `DatumBatch` beside tokens and targets.
        constants: fields of a `LossSpec`, with what they are where nobody says otherwise.
    """

    inputs: tuple[str, ...]
    constants: Mapping[str, float]


_POLICY = ("rollout_logprobs", "advantages")
LOSSES: Mapping[str, LossKind] = MappingProxyType({
    "cross_entropy": LossKind(("weights",), {}),
    "importance_sampling": LossKind(_POLICY, {}),
    "ppo": LossKind(_POLICY, {"clip_low": 0.8, "clip_high": 1.2}),
    "cispo": LossKind(_POLICY, {"clip_low": 0.0, "clip_high": 4.0}),
    "dro": LossKind(_POLICY, {"beta": 0.05}),
    # The paper's range is 0.9997 to 1.0004; that of PPO, which nobody is surprised by, stops only steps that went far astray.
    "gspo": LossKind((*_POLICY, "ratio_mask"), {"clip_low": 0.8, "clip_high": 1.2}),
})
"""By name; the formulas are in `offbeat.algorithms.datum_losses`."""


@dataclass(frozen=True)
class LossSpec:
    """A loss with its constants, of which each loss reads its own; see `LOSSES`.

    Attributes:
        name: of `LOSSES`.
        clip_low, clip_high: bounds of the ratio of the policy to the one that sampled.
        beta: weight of the squared difference of their log-probabilities.
    """

    name: str
    clip_low: float = 0.0
    clip_high: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in LOSSES:
            raise DataError(f"there is no loss {self.name[:80]!r}; use one of {', '.join(LOSSES)}")
        if not (0 <= self.clip_low <= self.clip_high < np.inf):
            raise DataError(
                f"the bounds of the ratio in {self.name} must be finite with 0 <= low <= high, got {self.clip_low} and {self.clip_high}")
        if not 0 <= self.beta < np.inf:
            raise DataError(f"beta of {self.name} must be finite and at least 0, got {self.beta}")

    @classmethod
    def of(cls, name: str, **constants: float) -> Self:
        """A loss with its default constants, but for those that are given.

        Raises:
            DataError: there is no such loss, or it has no such constant, or the value cannot be one.
        """
        known = LOSSES[name].constants if name in LOSSES else {}
        if name in LOSSES and (unknown := constants.keys() - known.keys()):
            raise DataError(f"the loss {name} has no constant {min(unknown)[:80]!r}; it has {', '.join(known) or 'none'}")
        return cls(name, **{**known, **constants})


_BY_TARGET = {"targets": np.int32, "weights": np.float32, "rollout_logprobs": np.float32, "advantages": np.float32, "ratio_mask": np.bool_}


@dataclass(frozen=True, eq=False)
class DatumBatch:
    """N sequences of together T tokens, with M targets.

    The loss of a sequence is a sum over its targets, and that of the batch the sum over its sequences: any split of it over ranks and
    micro-batches has the same total loss and gradient.

    Attributes:
        tokens: [T] int32.
        offsets: [N + 1] int64, sequence i is tokens[offsets[i]:offsets[i + 1]].
        target_offsets: [T + 1] int64, position t has the targets target_offsets[t]:target_offsets[t + 1].
        targets: [M] int32, token ids whose log-probability at that position the loss reads.
        weights: [M] float32, of cross_entropy; 0 elsewhere.
        rollout_logprobs: [M] float32, under the policy that sampled; finite where the loss reads it.
        advantages: [M] float32; where it is 0, the target is not trained on.
        ratio_mask: [M] bool, the targets over which gspo takes the mean, and which it trains on.
        losses: those of the sequences, each once.
        loss_ids: [N] int64, which of `losses` each sequence has.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    target_offsets: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    ratio_mask: np.ndarray
    losses: tuple[LossSpec, ...]
    loss_ids: np.ndarray

    def __post_init__(self) -> None:
        dtypes = {"tokens": np.int32, "offsets": np.int64, "target_offsets": np.int64, "loss_ids": np.int64, **_BY_TARGET}
        for name, dtype in dtypes.items():
            object.__setattr__(self, name, _vector(name, getattr(self, name), dtype))
        _check_offsets("offsets", self.offsets, len(self.tokens))
        _check_offsets("target_offsets", self.target_offsets, len(self.targets))
        for name, length in {**dict.fromkeys(_BY_TARGET, len(self.targets)), "loss_ids": len(self)}.items():
            if len(getattr(self, name)) != length:
                raise DataError(f"DatumBatch.{name} must have {length} entries, got {len(getattr(self, name))}")
        if len(self.target_offsets) != len(self.tokens) + 1:
            raise DataError(
                f"DatumBatch.target_offsets must have one entry more than the {len(self.tokens)} tokens, got {len(self.target_offsets)}")
        if len(self) and not 0 <= self.loss_ids.min() <= self.loss_ids.max() < len(self.losses):
            raise DataError(f"DatumBatch.loss_ids must be in 0..{len(self.losses) - 1}, got {sorted(set(self.loss_ids.tolist()))}")
        read = (self.advantages != 0) | self.ratio_mask
        for name, values in {
            "weights": self.weights, "advantages": self.advantages, "rollout_logprobs": self.rollout_logprobs[read]}.items():
            if not np.isfinite(values).all():
                raise DataError(f"DatumBatch.{name} must be finite, got {values[~np.isfinite(values)][0]}")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        return len(self.targets)

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64, tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def sequence_target_offsets(self) -> np.ndarray:
        """[N + 1] int64, sequence i has the targets between entries i and i + 1."""
        return self.target_offsets[self.offsets]

    @property
    def target_sequences(self) -> np.ndarray:
        """[M] int64, rising: the sequence of each target."""
        return np.repeat(np.arange(len(self)), np.diff(self.sequence_target_offsets))

    def select(self, indices: Sequence[int] | np.ndarray) -> "DatumBatch":
        """The given sequences, in the given order. An empty selection is a batch of no sequences."""
        indices = np.asarray(indices, dtype=np.int64)
        tokens = gather_ranges(self.offsets, indices)
        targets = gather_ranges(self.sequence_target_offsets, indices)
        return DatumBatch(
            tokens=self.tokens[tokens], offsets=_bounds(self.lengths[indices]),
            target_offsets=_bounds(np.diff(self.target_offsets)[tokens]), losses=self.losses, loss_ids=self.loss_ids[indices],
            **{name: getattr(self, name)[targets] for name in _BY_TARGET})

    @classmethod
    def concatenate(cls, parts: Sequence["DatumBatch"]) -> "DatumBatch":
        """The sequences of all parts of one batch, at least one part; equal losses become one."""
        losses = tuple(dict.fromkeys(loss for part in parts for loss in part.losses))
        ids = [np.array([losses.index(loss) for loss in part.losses], np.int64)[part.loss_ids] for part in parts]
        joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", *_BY_TARGET)}
        return cls(
            **joined, offsets=_bounds(np.concatenate([part.lengths for part in parts])),
            target_offsets=_bounds(np.concatenate([np.diff(part.target_offsets) for part in parts])),
            losses=losses, loss_ids=np.concatenate(ids))


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _vector(name: str, values: Any, dtype: Any) -> np.ndarray:
    given = np.asarray(values)
    with np.errstate(over="ignore", invalid="ignore"):
        array = given.astype(dtype, copy=False)
    if array.ndim != 1:
        raise DataError(f"DatumBatch.{name} must have one dimension, got shape {array.shape}")
    if np.issubdtype(dtype, np.integer) and not np.array_equal(array, given):
        raise DataError(f"DatumBatch.{name} must hold whole numbers that fit {np.dtype(dtype).name}")
    return array


def _check_offsets(name: str, offsets: np.ndarray, end: int) -> None:
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != end or np.any(np.diff(offsets) < 0):
        raise DataError(f"DatumBatch.{name} must rise from 0 to {end}, got {offsets[:8].tolist()} and so on")
