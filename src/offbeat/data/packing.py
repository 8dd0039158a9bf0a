"""Packing: which sequences share a micro-batch, and how a micro-batch becomes one row of tokens without padding.

Called by `ranks/sharding.py` to plan (`plan_microbatches`) and by the trainer before each forward pass (`pack_row`); numpy only. A row
holds only tokens on which some loss depends: tokens after the last predicting token of a sequence are left out, and with `share_prefix`
samples of one prompt run that prompt once. The plan counts exactly the tokens that `pack_row` lays out, so its budget is a hard cap on
memory.

For example, the prompt [7, 8] shared by the answers [1, 2] and [3] (answer tokens are trained on):

    tokens     [7, 8,   1]      the prompt, then the first answer without its last token; the second answer needs no token of its own
    positions  [0, 1,   2]
    segments   [0, 2) alone, [2, 3) after prefix 0
    source     [1, 2,  1]       each trained token is predicted at ...
    target     [1, 2,  3]       ... and is
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from offbeat.data.balance import longest_first, lower_bound, partition
from offbeat.data.batch import Batch
from offbeat.data.cost import TOKENS, CostModel, run_work
from offbeat.data.sample_supports import Supports
from offbeat.errors import DataError


@dataclass(frozen=True, eq=False)
class Segments:
    """S runs of consecutive row tokens. A token attends to itself, to earlier tokens of its run, and to all of the run's prefix.

    Attributes:
        starts: [S] int64, first row token of the run; runs follow one another and cover the row.
        lengths: [S] int64, at least 1.
        prefix: [S] int64, the earlier segment whose tokens precede this run's; -1 for none. A prefix has no prefix itself.
    """

    starts: np.ndarray
    lengths: np.ndarray
    prefix: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def prefix_lengths(self) -> np.ndarray:
        """[S] int64, length of each run's prefix; 0 where there is none."""
        return np.where(self.prefix >= 0, self.lengths[self.prefix], 0) if len(self) else self.lengths

    @property
    def longest_span(self) -> int:
        """Largest number of tokens that one token attends to, including itself."""
        return int((self.lengths + self.prefix_lengths).max(initial=0))


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One forward pass over R tokens that scores M of a batch's targets.

    Attributes:
        tokens: [R] int32.
        positions: [R] int32, position of each token in its own sequence.
        source: [M] int64, row index of the hidden state that predicts each target; repeats where several targets share it.
        target: [M] int64, id of the target's token.
        batch_index: [M] int64, ascending, indices of the targets in the batch.
        owner: [S] int64, the sequence of the batch whose tokens each segment runs; for a shared prefix, one of those that share it.
        routes: [R, K], the experts that each token is to use; None where routers choose.
        supports: of the M targets, the tokens among which each is normalised; None for the whole vocabulary.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segments: Segments
    source: np.ndarray
    target: np.ndarray
    batch_index: np.ndarray
    owner: np.ndarray
    routes: np.ndarray | None = None
    supports: Supports | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def work(self) -> np.ndarray:
        """[2] float64, work of the row, the sum over its [S, 2] runs; see `data/cost.py`."""
        return run_work(self.segments.lengths, self.segments.prefix_lengths).sum(axis=0)


@dataclass(frozen=True, eq=False)
class Plan:
    """The sequences of each rank and micro-batch in one optimizer step.

    Attributes:
        microbatches: for each rank the same number (at least 1) of arrays [n] int64 of ascending sequence indices, such as
            [[[0, 2]], [[1, 3]]] for two ranks; some may be empty. Every sequence appears exactly once.
        work: [R, 2], work of each rank, as in `data/cost.py`.
        work_in_order: [R, 2], work of each rank if the groups were dealt in their order.
        lower_bound: no split of the same units gives its busiest rank a smaller load than this.
    """

    microbatches: list[list[np.ndarray]]
    work: np.ndarray
    work_in_order: np.ndarray
    lower_bound: float


def pack_row(batch: Batch, *, share_prefix: bool, families: np.ndarray | None = None) -> PackedRow:
    """Lay a whole batch out as one row, which has no tokens if nothing in the batch is scored (see `offbeat.model.logprobs.dummy_row`).

    Args:
        share_prefix: run a prompt once for the sequences of a group whose first `prefix_lens` tokens really are equal.
        families: [N] int64; sequences of equal number are adjacent, and families ascend; None puts all into one. A group lies within one
            family.
    """
    used = _used_lengths(batch)
    own_from, host = _shared_prefixes(batch, used) if share_prefix else (np.zeros(len(batch), np.int64), np.full(len(batch), -1))
    own_lengths = np.maximum(used - own_from, 0)  # 0 where the prompt's last token predicts all that a sequence is trained on
    hosts = np.unique(host[host >= 0])

    # A run is tokens [first, first + length) of sequence `owner`: one per shared prompt, then one per sequence.
    owner = np.concatenate([hosts, np.arange(len(batch))])
    first = np.concatenate([np.zeros_like(hosts), own_from])
    length = np.concatenate([own_from[hosts], own_lengths])
    prefix = np.concatenate([np.full_like(hosts, -1), np.where(host >= 0, np.searchsorted(hosts, host), -1)])
    # Runs without a prefix first (a prefix must stand before its users), then by length: attention computes runs of like length together.
    prefix_length = np.where(prefix >= 0, length[prefix], 0)
    family = np.zeros_like(owner) if families is None else families[owner]
    order = np.lexsort((prefix_length, length, prefix >= 0, family))
    order = order[length[order] > 0]  # attention has no use for an empty run
    rank_of_run = np.full(len(length), -1)
    rank_of_run[order] = np.arange(len(order))
    owner_s, first_s, length_s, prefix_s = owner[order], first[order], length[order], prefix[order]
    starts = np.cumsum(length_s) - length_s

    positions = np.repeat(first_s - starts, length_s) + np.arange(length_s.sum())
    segments = Segments(starts, length_s, np.where(prefix_s >= 0, rank_of_run[prefix_s], -1))
    run_start = np.zeros(len(length), np.int64)
    run_start[order] = starts
    prompt_start = np.where(host >= 0, run_start[np.searchsorted(hosts, host)], 0) if len(hosts) else np.zeros(len(batch), np.int64)
    own_start = run_start[len(hosts) :]

    sequence = batch.target_sequences
    predictor = batch.positions - batch.offsets[sequence]
    # The first token of an answer is predicted by the prompt's last one, which stands in another run than the answer.
    in_prefix = predictor < own_from[sequence]
    source = np.where(in_prefix, prompt_start[sequence] + predictor, own_start[sequence] + predictor - own_from[sequence])
    place = np.repeat(batch.offsets[owner_s], length_s) + positions
    return PackedRow(
        tokens=batch.tokens[place], positions=positions.astype(np.int32), segments=segments, source=source,
        target=batch.targets.astype(np.int64), batch_index=np.arange(batch.num_targets), owner=owner_s,
        routes=None if batch.routes is None else batch.routes[place], supports=batch.supports,
    )


def find_prompts(batch: Batch) -> Batch:
    """Replace group ids and prefix lengths of a batch by those found in its tokens.

    Sequences with the same tokens up to the one that predicts their first target of nonzero weight form a group, whose prompt can run once.
    A sequence without such a target shares nothing.
    """
    trained = np.flatnonzero(batch.columns["loss_weights"])
    sequences, first = np.unique(batch.target_sequences[trained], return_index=True)
    prefix_lens = np.zeros(len(batch), np.int64)
    prefix_lens[sequences] = batch.positions[trained[first]] + 1 - batch.offsets[sequences]
    # Groups are found by the prompts' bytes; a sequence without a prompt has its own index as key, which no other one has.
    ids: dict[bytes | int, int] = {}
    keys = [batch.tokens[start : start + length].tobytes() if length else i
            for i, (start, length) in enumerate(zip(batch.offsets[:-1], prefix_lens, strict=True))]
    group_ids = np.array([ids.setdefault(key, len(ids)) for key in keys], np.int64)
    return replace(batch, sequences={**batch.sequences, "group_ids": group_ids, "prefix_lens": prefix_lens})


def plan_microbatches(
    batch: Batch, *, num_ranks: int, max_tokens: int, share_prefix: bool, whole_groups: bool = False, cost: CostModel = TOKENS,
    balance: bool = True,
) -> Plan:
    """Divide a batch over the ranks, and each rank's share into micro-batches.

    A *unit* cannot be split: the sequences of a group that share a prompt, as far as they fit into one micro-batch, or else a single
    sequence. With `whole_groups` it is always the whole group.

    Args:
        batch: all sequences of one optimizer step.
        max_tokens: hard cap on the tokens in the row of one micro-batch.
        share_prefix: keep the sequences of a group together, and count their prompt once.
        whole_groups: whether a loss compares the sequences of a group, such as the two answers of a preference pair.
        balance: give all ranks similar loads, regardless of the number of groups, in as few micro-batches as first-fit-decreasing finds.
            False deals whole groups in their order, equally many to each rank, or one more.

    Raises:
        DataError: num_ranks < 1, or a single sequence, or with `whole_groups` a group, exceeds max_tokens.
    """
    if num_ranks < 1:
        raise DataError(f"the number of ranks must be at least 1, got {num_ranks}")
    units = list(
        _whole_groups(batch, max_tokens=max_tokens, share_prefix=share_prefix) if whole_groups else
        _units(batch, max_tokens=max_tokens, share_prefix=share_prefix))
    work_U2 = np.array([work for _, work in units]).reshape(-1, 2)
    tokens, loads = work_U2[:, 0].astype(np.int64).tolist(), cost.load(work_U2)
    in_order = _in_order(_group_of_units(batch, [members for members, _ in units]), num_ranks)
    if balance:
        # All ranks run the same number of micro-batches, because each one is a collective. Balanced parts usually fit into as many as
        # the fewest bins need; where they do not, the bins themselves are dealt, which always fits but balances less well.
        bins = _first_fit(tokens, max_tokens)
        num_rounds = max(1, -(-len(bins) // num_ranks))
        parts = [list(part) for part in partition(loads, num_ranks).parts]
        plan = _evenly(parts, tokens, num_rounds, max_tokens) or _deal(bins, tokens, loads, num_ranks, num_rounds)
    else:
        num_rounds = max(1, *(len(_first_fit([tokens[unit] for unit in part], max_tokens)) for part in in_order))
        plan = _evenly(in_order, tokens, num_rounds, max_tokens)
        assert plan is not None, "each part fits into as many micro-batches as first-fit found for it"
    return Plan(
        microbatches=[
            [np.sort(np.concatenate([np.empty(0, np.int64), *(units[unit][0] for unit in micro)])) for micro in rank] for rank in plan],
        work=np.stack([work_U2[[unit for micro in rank for unit in micro]].sum(axis=0) for rank in plan]),
        work_in_order=np.stack([work_U2[part].sum(axis=0) for part in in_order]),
        lower_bound=lower_bound(loads, num_ranks))


def _used_lengths(batch: Batch) -> np.ndarray:
    """Return [N] int64, the number of leading tokens on which a loss depends, up to the one that predicts a sequence's last target."""
    used, ends = np.zeros(len(batch), np.int64), batch.target_offsets
    some = np.diff(ends) > 0
    used[some] = batch.positions[ends[1:][some] - 1] - batch.offsets[:-1][some] + 1
    return used


def _shared_prefixes(batch: Batch, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the sequences that leave their prompt to another of their group.

    Returns:
        own_from: [N] int64, first token that a sequence runs itself; 0 if it shares nothing.
        host: [N] int64, the sequence that runs the shared prompt; -1 if nothing is shared.
    """
    own_from, host = np.zeros(len(batch), np.int64), np.full(len(batch), -1)
    # A sequence that uses less than its prompt gains nothing from sharing it.
    able = np.flatnonzero((batch.prefix_lens > 0) & (used >= batch.prefix_lens))
    for members in _groups(batch, able):
        prompt_len = int(batch.prefix_lens[members[0]])
        # Equal ids promise equal prompts; a sequence that breaks the promise must not run on another's prompt.
        while len(members) > 1:  # each turn settles the sequences whose prompt equals that of the first one left
            prompts = batch.tokens[batch.offsets[members][:, None] + np.arange(prompt_len)]
            equal = (prompts == prompts[0]).all(axis=1)
            sharing, members = members[equal], members[~equal]
            if len(sharing) > 1:
                own_from[sharing], host[sharing] = prompt_len, sharing[0]
    return own_from, host


def _groups(batch: Batch, candidates: np.ndarray) -> list[np.ndarray]:
    """Split candidates [N] by (group id, prefix length) into arrays of ascending sequence indices, such as [[0, 2], [1, 3]]."""
    order = candidates[np.lexsort((candidates, batch.prefix_lens[candidates], batch.group_ids[candidates]))]
    keys = np.stack([batch.group_ids[order], batch.prefix_lens[order]])
    return np.split(order, np.flatnonzero((np.diff(keys) != 0).any(axis=0)) + 1) if len(order) else []


def _units(batch: Batch, *, max_tokens: int, share_prefix: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield sequences [K] that must stay together, with their work [2]: groups cut to max_tokens, or single sequences."""
    used = _used_lengths(batch)
    if used.max(initial=0) > max_tokens:  # no plan can hold it, and cutting it would change the loss
        worst = int(used.argmax())
        raise DataError(
            f"sequence {worst} of {batch.lengths[worst]} tokens needs a row of {used[worst]}, which exceeds"
            f" train.max_tokens_per_microbatch = {max_tokens}; raise it or shorten the sequences"
        )
    if not share_prefix:
        yield from zip(np.arange(len(batch))[:, None], run_work(used), strict=True)
        return
    own_from, host = _shared_prefixes(batch, used)
    alone = np.flatnonzero(host < 0)
    yield from zip(alone[:, None], run_work(used[alone]), strict=True)
    for leader in np.unique(host[host >= 0]):
        prompt_len = int(own_from[leader])
        members = np.flatnonzero(host == leader)
        own = used[members] - prompt_len
        # Bins hold the members' own tokens; each bin pays for the prompt once.
        for micro in map(sorted, _first_fit(own.tolist(), max_tokens - prompt_len)):
            yield members[micro], run_work(prompt_len) + run_work(own[micro], prompt_len).sum(axis=0)


def _whole_groups(batch: Batch, *, max_tokens: int, share_prefix: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the sequences [K] of each group, with their work [2]."""
    used = _used_lengths(batch)
    own_from, host = _shared_prefixes(batch, used) if share_prefix else (np.zeros(len(batch), np.int64), np.full(len(batch), -1))
    work_N2 = run_work(used - own_from, own_from)
    hosts = np.unique(host[host >= 0])
    work_N2[hosts] += run_work(own_from[hosts])  # the prompt, which runs once
    for group_id in np.unique(batch.group_ids):
        members = np.flatnonzero(batch.group_ids == group_id)
        work = work_N2[members].sum(axis=0)
        if work[0] > max_tokens:
            raise DataError(
                f"the {len(members)} sequences of group {group_id}, of {' and '.join(map(str, batch.lengths[members]))} tokens, need a row"
                f" of {work[0]:.0f}, which exceeds train.max_tokens_per_microbatch = {max_tokens}; their loss compares them, so they must"
                " be in one row: raise it or shorten the sequences")
        yield members, work


def _group_of_units(batch: Batch, units: list[np.ndarray]) -> np.ndarray:
    """Return [U] int64, the position of each unit's group among the groups of the batch, in order of appearance."""
    _, first, group = np.unique(batch.group_ids, return_index=True, return_inverse=True)
    position = np.argsort(np.argsort(first))
    return position[group[[members[0] for members in units]]] if units else np.zeros(0, np.int64)


def _in_order(group_of_units: np.ndarray, num_ranks: int) -> list[list[int]]:
    """Return the units of each rank if groups are dealt in contiguous chunks whose sizes differ by at most 1.

    For example, the groups [0, 0, 1, 2] of units, [U] int64, and two ranks give [[0, 1, 2], [3]].
    """
    num_groups = int(group_of_units.max(initial=-1)) + 1
    return [np.flatnonzero(np.isin(group_of_units, chunk)).tolist() for chunk in np.array_split(np.arange(num_groups), num_ranks)]


def _evenly(parts: list[list[int]], tokens: list[int], num_rounds: int, max_tokens: int) -> list[list[list[int]]] | None:
    """Balance each rank's units over its micro-batches by tokens; returns None if they do not fit.

    By tokens, not by a fitted cost, so that the same units make the same micro-batches, and the same sums, in every run.
    """
    plan = []
    for part in parts:
        own = [tokens[unit] for unit in part]
        # The longest-first rule fills micro-batches evenly but knows no cap; first-fit knows the cap but fills them unevenly.
        micros = longest_first(own, num_rounds)
        if any(sum(own[i] for i in micro) > max_tokens for micro in micros):
            micros = _first_fit(own, max_tokens)
        if len(micros) > num_rounds:
            return None
        plan.append([[part[i] for i in micro] for micro in micros] + [[]] * (num_rounds - len(micros)))
    return plan


def _deal(bins: list[list[int]], tokens: list[int], loads: np.ndarray, num_ranks: int, num_rounds: int) -> list[list[list[int]]]:
    """Give full micro-batches, longest first, to the least-loaded rank that has room for one more; `loads` are [U], of the units."""
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]  # by rank and micro-batch, the units in it
    rank_loads = [0.0] * num_ranks
    for _, micro in sorted(((sum(tokens[unit] for unit in micro), micro) for micro in bins), reverse=True):
        rank = min((r for r in range(num_ranks) if len(plan[r]) < num_rounds), key=rank_loads.__getitem__)
        plan[rank].append(micro)
        rank_loads[rank] += float(loads[micro].sum())
    return [micros + [[]] * (num_rounds - len(micros)) for micros in plan]


def _first_fit(costs: list[int], capacity: int) -> list[list[int]]:
    """Return item indices in bins of at most `capacity`, by first-fit decreasing: at most 11/9 of the fewest bins possible, plus one."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        chosen = next((b for b, free in enumerate(room) if free >= costs[item]), None)
        if chosen is None:
            chosen = len(bins)
            bins.append([])
            room.append(capacity)
        bins[chosen].append(item)
        room[chosen] -= costs[item]
    return bins
