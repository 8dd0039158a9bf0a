"""A training batch as plain numpy: sequences back to back, with what the loss needs beside each token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.errors import DataError

_DTYPES = {"tokens": np.int32, "loss_mask": np.bool_, "rollout_logprobs": np.float32, "advantages": np.float32, "loss_weights": np.float32}


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """N sequences of together T tokens.

    The loss of a batch is the sum over tokens of `loss_weights * token_loss`. All denominators are inside the weights, computed over the
    whole batch, so any split of it over ranks and micro-batches has the same total loss and gradient.

    Attributes:
        tokens: [T] int32.
        loss_mask: [T] bool, True on tokens that are trained on. The first token of a sequence is never one: nothing predicts it.
        rollout_logprobs: [T] float32, under the distribution that sampled the token; 0 where loss_mask is False.
        advantages: [T] float32; 0 where loss_mask is False.
        loss_weights: [T] float32; 0 where loss_mask is False.
        offsets: [N + 1] int64, sequence i is tokens[offsets[i]:offsets[i + 1]].
        group_ids: [N] int32, sequences with equal ids share their first prefix_lens tokens.
        prefix_lens: [N] int32, length of that shared prompt; 0 where nothing is shared.
        denominator: tokens or sequences that the loss weights average over, so that batches drawn apart can be weighed against each other.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    loss_weights: np.ndarray
    offsets: np.ndarray
    group_ids: np.ndarray
    prefix_lens: np.ndarray
    denominator: float = 1.0

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            array = np.asarray(getattr(self, name), dtype=dtype)
            if array.shape != self.tokens.shape:
                raise DataError(f"TokenBatch.{name} must have shape {self.tokens.shape} like tokens, got {array.shape}")
            object.__setattr__(self, name, array)
        for name, dtype in (("offsets", np.int64), ("group_ids", np.int32), ("prefix_lens", np.int32)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=dtype))
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens) or np.any(np.diff(self.offsets) < 0):
            raise DataError(f"TokenBatch.offsets must rise from 0 to {len(self.tokens)}, got {self.offsets.tolist()}")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64."""
        return np.diff(self.offsets)

    def select(self, indices: Sequence[int] | np.ndarray) -> "TokenBatch":
        """The given sequences, in the given order; weights stay as they are. An empty selection is a batch of no sequences."""
        indices = np.asarray(indices, dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(self.lengths[indices])])
        where = gather_ranges(self.offsets, indices)
        return TokenBatch(
            **{name: getattr(self, name)[where] for name in _DTYPES},
            offsets=offsets, group_ids=self.group_ids[indices], prefix_lens=self.prefix_lens[indices], denominator=self.denominator,
        )

    @classmethod
    def concatenate(cls, parts: Sequence["TokenBatch"]) -> "TokenBatch":
        """The sequences of all parts of one batch, at least one part. Group ids are made distinct between parts."""
        lengths = np.concatenate([part.lengths for part in parts])
        firsts = np.cumsum([0, *(int(part.group_ids.max(initial=-1)) + 1 for part in parts)])
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _DTYPES},
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            group_ids=np.concatenate([part.group_ids + first for part, first in zip(parts, firsts[:-1], strict=True)]),
            prefix_lens=np.concatenate([part.prefix_lens for part in parts]),
            denominator=parts[0].denominator,
        )


def gather_ranges(offsets: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Positions of the ranges offsets[i]:offsets[i + 1] of the given i, one range after the other."""
    lengths = np.diff(offsets)[indices]
    starts = np.cumsum(lengths) - lengths
    return np.repeat(offsets[indices] - starts, lengths) + np.arange(lengths.sum())
