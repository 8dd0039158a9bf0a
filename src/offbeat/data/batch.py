"""A training batch in plain numpy: sequences back to back, the targets that they are to predict, and a value of each column per target.

Made from rollouts and supervised rows by `algorithms.experience`, and from clients' datums by the service; cut into shares by `ranks`;
computed by the trainer. For example, one sequence [7, 8, 9] that is to predict 8, then 5 or 6, and nothing at its end:

    tokens     [7, 8, 9]
    positions  [0, 1, 1]      the targets are predicted by the outputs of 7, of 8 and of 8
    targets    [8, 5, 6]

In reinforcement learning each generated token is a target, predicted by the output of the token before it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, Self

import numpy as np

from offbeat.config.loss_terms import FILTERS, REGULARISERS
from offbeat.data.expert_routes import join_routes
from offbeat.data.ranges import bounds, gather_ranges, joined, run_pieces, run_starts
from offbeat.data.sample_supports import Supports, join_supports
from offbeat.errors import DataError


@dataclass(frozen=True)
class WeightSpec:
    """The constant weight of a target, from w = exp(prox_logprobs - rollout_logprobs).

    Attributes:
        mode: "ratio" is w itself; "clamp" puts it into [low, high]; "mask" is w within [low, high], bounds included, and 0 outside.
        level: w of the token alone, the product over its sequence's targets, or their geometric mean.
    """

    mode: Literal["ratio", "clamp", "mask"]
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = 0.0
    high: float = 5.0


@dataclass(frozen=True)
class FilterSpec:
    """A rule that sets the weight of some targets to 0. A target is kept where `low <= metric <= high`.

    With x = prox_logprobs - rollout_logprobs, lp the current log-probability and A the advantage:

        ratio      exp(x); over a sequence, the exponential of the aggregated x
        k1         x
        k2         x^2 / 2
        k3         exp(x) - 1 - x, an estimate of KL(rollout || prox)
        binary_kl  the larger of the two divergences between the Bernoulli distributions with probabilities exp(prox) and exp(rollout)
        tv         exp(prox) - exp(rollout), the change of the target's probability
        opsm       the mean of rollout_logprobs - lp over the sequence; only targets with A < 0 are dropped, and only `high` counts
        m2         `high` bounds the mean of x^2 over all harmful targets of the batch; see `algorithms.selection`
        clip_cov   the covariance of log-probability and advantage; of targets strictly between `low` and `high`, a random `share` of the
                   batch's targets is dropped; see `algorithms.selection`

    Attributes:
        level: whether each target has its own value, or a sequence's all have their `aggregate`. opsm, m2 and clip_cov have levels of
            their own.
        share: of clip_cov.
    """

    metric: Literal[tuple(FILTERS)]  # pyright: ignore[reportInvalidTypeForm]
    level: Literal["token", "sequence"] = "token"
    aggregate: Literal["mean", "sum", "max"] = "mean"
    low: float = -math.inf
    high: float = math.inf
    share: float = 0.0


@dataclass(frozen=True)
class RegulariserSpec:
    """A term that is added to the loss of every target, also of those whose weight is 0; see `losses.regularisers`.

    kl_cov acts on a `share` of the batch's targets alone; see `algorithms.selection`.
    """

    kind: Literal[tuple(REGULARISERS)]  # pyright: ignore[reportInvalidTypeForm]
    coefficient: float
    share: float = 1.0


@dataclass(frozen=True)
class LossSpec:
    """A loss, as `losses.compose` computes it for each target: its objective times its constant weight, plus its regularisers.

    Attributes:
        name: objective, of `offbeat.config.objectives`, or "path/to/file.py:function" of the user's own.
        reads: inputs of an objective of the user's own besides ratio and advantages: "ref_logprobs", "entropy".
        constants: constants of the objective, such as {"clip_low": 0.8, "clip_high": 1.2}.
        anchor: the policy to which the objective's ratio compares the current one: "prox" at the start of the step, "rollout" that sampled.
        weight: factor of the objective for each target; None is 1.
        filters: all of them must keep a target.
        own_samples: whether the targets are loss tokens that this run's engines sampled, at their temperature, with a policy of its own;
            False for targets of clients, whose log-probabilities are at temperature 1.
    """

    name: str
    constants: dict[str, float | str] = field(default_factory=dict)
    anchor: Literal["prox", "rollout"] = "rollout"
    weight: WeightSpec | None = None
    filters: tuple[FilterSpec, ...] = ()
    regularisers: tuple[RegulariserSpec, ...] = ()
    own_samples: bool = False
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class SharedPrompts:
    """Which of N sequences begin with the same prompt, such as the samples of a group.

    Attributes:
        group_ids: [N] int64, equal where the prompt is.
        prefix_lens: [N] int64, tokens of the prompt; 0 for a sequence that shares none.
    """

    group_ids: np.ndarray
    prefix_lens: np.ndarray

    @classmethod
    def none(cls, num_sequences: int) -> Self:
        """Return what sequences share that share nothing."""
        return cls(np.arange(num_sequences), np.zeros(num_sequences, np.int64))


@dataclass(frozen=True, eq=False)
class Batch:
    """N sequences with T tokens in total, and M targets.

    The loss of a batch is the sum over targets of `loss_weights` times the target's loss. All denominators are in the weights, so any split
    of the sequences over ranks, micro-batches and passes has the same total loss and gradient.

    Attributes:
        tokens: [T] int32.
        offsets: [N + 1] int64, such as [0, 3, 5]; sequence i is tokens[offsets[i]:offsets[i + 1]].
        positions: [M] int64, ascending, indices into `tokens`: the token whose output predicts each target.
        targets: [M] int32, token ids.
        columns: [M] float32 each, by name: always `loss_weights`, and those that the losses read: `rollout_logprobs` (under the policy that
            sampled), `advantages`, `prox_logprobs`, `ref_logprobs`, `teacher_logprobs`, `teacher_least`, and the masks `ratio_mask`,
            `m2_mask`, `detach_mask`, `kl_cov_mask` and `imitate_mask` (1 or 0); for a critic `values` (before its update) and `returns`;
            for a reward model `margins`, by which a chosen answer is to lead.
        sequences: [N] int64 each, by name: always `group_ids` and `prefix_lens`, where sequences of equal ids share their first
            `prefix_lens` tokens; for a critic `truncated` (1 or 0); `signs`, 1 for a chosen answer and -1 for a rejected one of the group,
            where a loss compares them; `loss_ids` and `adapter_ids`, indices into `losses` and `adapters`, if there are several.
        adapters: names of the adapters that the sequences train; empty if the trainer trains one set of weights.
        denominator: number of targets or sequences over which the loss weights average, to weigh batches that were drawn separately.
        routes: [T, K], the experts of each token when it was sampled, to be replayed; see `data.expert_routes`. None where routers choose.
        supports: of the M targets, the tokens among which each was drawn; see `data.sample_supports`. None where all are whole.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    columns: dict[str, np.ndarray]
    sequences: dict[str, np.ndarray]
    losses: tuple[LossSpec, ...]
    adapters: tuple[str, ...] = ()
    denominator: float = 1.0
    routes: np.ndarray | None = None
    supports: Supports | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("tokens", np.int32), ("offsets", np.int64), ("positions", np.int64), ("targets", np.int32)):
            object.__setattr__(self, name, _vector(name, getattr(self, name), dtype))
        _check_offsets(self.offsets, len(self.tokens))
        if not (self.positions[1:] >= self.positions[:-1]).all():
            raise DataError("the positions of a batch's targets must rise")
        if len(self.positions) and not 0 <= self.positions[0] <= self.positions[-1] < len(self.tokens):
            raise DataError(
                f"the positions of a batch's targets must be in 0..{len(self.tokens) - 1}, got {self.positions[[0, -1]].tolist()}")
        _check_length("targets", self.targets, len(self.positions))
        if self.routes is not None:
            _check_length("routes", self.routes, len(self.tokens))
        if self.supports is not None:
            _check_length("supports", self.supports, len(self.positions))
        for field_name, dtype, length in (("columns", np.float32, len(self.positions)), ("sequences", np.int64, len(self))):
            given: Mapping[str, Any] = getattr(self, field_name)
            arrays = {name: _vector(name, values, dtype) for name, values in given.items()}
            for name, array in arrays.items():
                _check_length(name, array, length)
            object.__setattr__(self, field_name, arrays)
        for name, pool in (("loss_ids", self.losses), ("adapter_ids", self.adapters)):
            ids = self.ids(name)
            if len(ids) and (pool or name in self.sequences) and not 0 <= ids.min() <= ids.max() < len(pool):
                raise DataError(f"{name} of a batch must be in 0..{len(pool) - 1}, got {sorted(set(ids.tolist()))}")

    @classmethod
    def of_next_tokens(
        cls, tokens: np.ndarray, trained: np.ndarray, *, lengths: Sequence[int] | np.ndarray, columns: Mapping[str, np.ndarray],
        losses: tuple[LossSpec, ...], shared: SharedPrompts | None = None, denominator: float = 1.0,
    ) -> Self:
        """Make a batch in which some tokens are targets, each predicted by the output of the token before it.

        Args:
            tokens: [T] int32.
            trained: [T] bool, which tokens are targets.
            lengths: [N], of the sequences.
            columns: [T] each, by name; only values at trained tokens are used.

        Raises:
            DataError: the first token of a sequence, which nothing predicts, is trained on; or arrays do not fit each other.
        """
        tokens, trained, offsets = np.asarray(tokens), np.asarray(trained, np.bool_), bounds(lengths)
        _check_offsets(offsets, len(tokens))
        for name, values in {"loss mask": trained, **columns}.items():
            _check_length(name, np.asarray(values), len(tokens))
        sequences = [slice(start, end) for start, end in pairwise(offsets.tolist())]
        return cls.of_sequences(
            [tokens[own] for own in sequences], [trained[own] for own in sequences],
            columns={name: np.asarray(values)[trained] for name, values in columns.items()}, losses=losses, shared=shared,
            denominator=denominator)

    @classmethod
    def of_sequences(
        cls, tokens: Sequence[np.ndarray], trained: Sequence[np.ndarray], *, columns: Mapping[str, np.ndarray],
        losses: tuple[LossSpec, ...], of_tokens: Mapping[str, Sequence[np.ndarray]] | None = None,
        shared: SharedPrompts | None = None, denominator: float = 1.0,
    ) -> Self:
        """Make the batch of `of_next_tokens` from sequences that lie apart; raises as it does.

        Args:
            tokens: N sequences, [L] int32 each.
            trained: N masks, [L] bool each.
            columns: [M] each, by name, one value for each target.
            of_tokens: further columns by name, N arrays [L] float32 each, of which only values at trained tokens are used.
        """
        if any(len(mask) and mask[0] for mask in trained):
            raise DataError("the first token of a sequence cannot be trained on: nothing predicts it")
        offsets = bounds([len(sequence) for sequence in tokens])
        ends = bounds([int(np.count_nonzero(mask)) for mask in trained])
        whole, positions, targets = np.empty(offsets[-1], np.int32), np.empty(ends[-1], np.int64), np.empty(ends[-1], np.int32)
        gathered = [(np.empty(ends[-1], np.float32), arrays) for arrays in (of_tokens or {}).values()]
        starts, first_targets = offsets.tolist(), ends.tolist()
        # One sequence at a time, so that intermediate arrays stay in the processor's cache.
        for i, (sequence, mask) in enumerate(zip(tokens, trained, strict=True)):
            start, own = starts[i], slice(first_targets[i], first_targets[i + 1])
            index = mask.nonzero()[0]
            whole[start : starts[i + 1]] = _vector("tokens", sequence, np.int32)
            at: slice | np.ndarray = index
            if len(index) and index[-1] - index[0] + 1 == len(index):  # a single answer, as most have, is copied as one piece
                at = slice(int(index[0]), int(index[-1]) + 1)
            targets[own] = whole[start : starts[i + 1]][at]
            for column, arrays in gathered:
                column[own] = arrays[i][at]
            np.add(index, start - 1, out=positions[own])
        shared = shared or SharedPrompts.none(len(tokens))
        return cls(
            tokens=whole, offsets=offsets, positions=positions, targets=targets,
            columns={**{name: column for name, (column, _) in zip(of_tokens or {}, gathered, strict=True)}, **columns},
            sequences={"group_ids": shared.group_ids, "prefix_lens": shared.prefix_lens}, losses=losses, denominator=denominator)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        return len(self.positions)

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64, number of tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def group_ids(self) -> np.ndarray:
        """[N] int64; sequences with equal ids share their first `prefix_lens` tokens."""
        return self.sequences["group_ids"]

    @property
    def prefix_lens(self) -> np.ndarray:
        """[N] int64, length of the shared prompt; 0 where nothing is shared."""
        return self.sequences["prefix_lens"]

    @cached_property
    def target_offsets(self) -> np.ndarray:
        """[N + 1] int64; sequence i has the targets from entry i up to entry i + 1."""
        return np.searchsorted(self.positions, self.offsets)

    @cached_property
    def target_sequences(self) -> np.ndarray:
        """[M] int64, ascending: the sequence of each target."""
        return np.repeat(np.arange(len(self)), np.diff(self.target_offsets))

    def with_columns(self, **columns: np.ndarray) -> "Batch":
        """Return the batch with columns, [M] each, added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def select(self, indices: Sequence[int] | np.ndarray) -> "Batch":
        """Select sequences by their indices [K] in the given order; loss weights do not change. It may be empty."""
        indices = np.asarray(indices, dtype=np.int64)
        first = run_starts(indices)
        tokens, targets = (run_pieces(ends, indices, first) for ends in (self.offsets, self.target_offsets))
        offsets, positions = bounds(self.lengths[indices]), joined(self.positions, targets)
        moved = offsets[first] - self.offsets[indices[first]]
        for start, piece, shift in zip(accumulate(targets, _after, initial=0), targets, moved.tolist(), strict=False):
            positions[start : _after(start, piece)] += shift
        return replace(
            self, tokens=joined(self.tokens, tokens), offsets=offsets, positions=positions,
            targets=joined(self.targets, targets), columns={name: joined(values, targets) for name, values in self.columns.items()},
            sequences={name: values[indices] for name, values in self.sequences.items()},
            routes=None if self.routes is None else joined(self.routes, tokens),
            supports=None if self.supports is None else self.supports.at_indices(gather_ranges(self.target_offsets, indices)))

    @classmethod
    def concatenate(cls, parts: Sequence["Batch"]) -> "Batch":
        """Concatenate one or more batches; equal losses and adapters are merged, and group ids are made distinct between parts.

        A column that a part lacks because its losses do not read it, also of sequences, is 0 there. The denominator is the first part's.
        """
        losses, loss_ids = _merged([part.losses for part in parts], [part.ids("loss_ids") for part in parts])
        adapters, adapter_ids = _merged([part.adapters for part in parts], [part.ids("adapter_ids") for part in parts])
        firsts = np.cumsum([0, *(int(part.group_ids.max(initial=-1)) + 1 for part in parts)])
        others = dict.fromkeys(
            name for part in parts for name in part.sequences if name not in ("group_ids", "prefix_lens", "loss_ids", "adapter_ids"))
        sequences = {
            **{name: np.concatenate([part.ids(name) for part in parts]) for name in others},
            "group_ids": np.concatenate([part.group_ids + first for part, first in zip(parts, firsts[:-1], strict=True)]),
            "prefix_lens": np.concatenate([part.prefix_lens for part in parts]),
            **({"loss_ids": loss_ids} if len(losses) > 1 else {}), **({"adapter_ids": adapter_ids} if adapters else {})}
        starts = np.cumsum([0, *(part.num_tokens for part in parts)])
        return cls(
            tokens=np.concatenate([part.tokens for part in parts]), offsets=bounds(np.concatenate([part.lengths for part in parts])),
            positions=np.concatenate([part.positions + start for part, start in zip(parts, starts[:-1], strict=True)]),
            targets=np.concatenate([part.targets for part in parts]),
            columns={
                name: np.concatenate([part.columns.get(name, np.zeros(part.num_targets, np.float32)) for part in parts])
                for name in dict.fromkeys(name for part in parts for name in part.columns)},
            sequences=sequences, losses=losses, adapters=adapters, denominator=parts[0].denominator,
            routes=join_routes([part.routes for part in parts], [part.num_tokens for part in parts]),
            supports=join_supports([part.supports for part in parts], [part.num_targets for part in parts]))

    def ids(self, name: str) -> np.ndarray:
        """Return [N] int64, a column of the sequences such as `loss_ids` or `adapter_ids`; zeros if the batch does not have it."""
        return self.sequences.get(name, np.zeros(len(self), np.int64))


def _after(start: int, piece: slice) -> int:
    return start + piece.stop - piece.start


def _merged(pools: Sequence[tuple[Any, ...]], ids: Sequence[np.ndarray]) -> tuple[tuple[Any, ...], np.ndarray]:
    """Merge pools without duplicates; returns the entries, and all ids as indices into them, [N] int64."""
    merged: list[Any] = []
    for entry in (entry for pool in pools for entry in pool):
        if entry not in merged:
            merged.append(entry)
    places = [np.array([merged.index(entry) for entry in pool], np.int64) for pool in pools]
    return tuple(merged), np.concatenate([place[own] if len(place) else own for place, own in zip(places, ids, strict=True)])


def _vector(name: str, values: Any, dtype: Any) -> np.ndarray:
    given = np.asarray(values)
    if given.dtype == dtype and given.ndim == 1:
        return given
    with np.errstate(over="ignore", invalid="ignore"):
        array = given.astype(dtype, copy=False)
    if array.ndim != 1:
        raise DataError(f"{name} of a batch must have one dimension, got shape {array.shape}")
    if np.issubdtype(dtype, np.integer) and given.dtype != array.dtype and not np.array_equal(array, given):
        raise DataError(f"{name} of a batch must hold whole numbers that fit {np.dtype(dtype).name}")
    return array


def _check_length(name: str, array: np.ndarray | Supports, length: int) -> None:
    if len(array) != length:
        raise DataError(f"{name} of a batch must have {length} entries, got {len(array)}")


def _check_offsets(offsets: np.ndarray, end: int) -> None:
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != end or np.any(np.diff(offsets) < 0):
        raise DataError(f"offsets of a batch must rise from 0 to {end}, got {offsets[:8].tolist()} and so on")
