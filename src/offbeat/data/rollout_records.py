"""Makes the kept records of a run's rollouts from groups and their batch. Called by the loop, on a thread of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from offbeat.data import wire
from offbeat.data.batch import Batch
from offbeat.data.pieces import Pieces
from offbeat.data.row import Row
from offbeat.data.stored_rollouts import KeptGroup, KeptTrajectory, KeptTurn, Numbers
from offbeat.data.trajectory import Group, Trajectory

_DIGITS = 5
_KEPT_COLUMNS = ("advantages", "prox_logprobs", "ref_logprobs")

Columns = Mapping[str, np.ndarray]
"""Values of a trajectory's generated tokens, by the name of the batch's column, such as "advantages"."""


def trained_columns(groups: Sequence[Group], batch: Batch) -> dict[tuple[int, int], Columns]:
    """Return the columns of each trajectory that is in a batch, by its group's position and its own position in the group.

    The groups are those given to `algorithms.experience.make_batch`. Columns are empty where the batch's targets are a teacher's likeliest
    tokens instead of the generated ones.
    """
    names = [name for name in _KEPT_COLUMNS if name in batch.columns] if "rollout_logprobs" in batch.columns else []
    found: dict[tuple[int, int], Columns] = {}
    sequences = {int(group): np.flatnonzero(batch.group_ids == group).tolist() for group in np.unique(batch.group_ids)}
    for position, group in enumerate(groups):
        waiting = sequences.get(position, [])
        places = {id(t): place for place, t in enumerate(group.trajectories)}
        # The sequences of a group stand in this order, without those that were left out.
        for t in (t for own in group.usable_parts for part in own for t in part.chains):
            if waiting and _is_of(batch, waiting[0], t):
                own = slice(*batch.target_offsets[[waiting[0], waiting[0] + 1]].tolist())
                found[position, places[id(t)]] = {name: batch.columns[name][own] for name in names}
                waiting = waiting[1:]
    return found


def keep(
    group: Group, row: Row, pieces: Pieces, *, step: int, columns: Mapping[int, Columns], why: str = "", drawn_again: bool = False,
) -> KeptGroup:
    """Return the kept record of a group; `columns` are those of each trajectory that is trained on, by its position in the group."""
    return KeptGroup(
        prompt_id=group.prompt_id, admitted_version=group.admitted_version, rejected=group.rejected, prompt=_whole(row.prompt_text),
        answer=_whole(row.answer), why=why, drawn_again=drawn_again, step=step,
        trajectories=tuple(_keep_trajectory(t, pieces, columns.get(place)) for place, t in enumerate(group.trajectories)))


def keep_lines(groups: Sequence[Group], rows: Sequence[Row], batch: Batch, pieces: Pieces, *, step: int) -> Iterator[bytes]:
    """Yield a line of JSON for each group that a step trained on, whose rows are given in the same order."""
    columns = trained_columns(groups, batch)
    for position, (group, row) in enumerate(zip(groups, rows, strict=True)):
        own = {place: values for (of_group, place), values in columns.items() if of_group == position}
        yield wire.encode_json(keep(group, row, pieces, step=step, columns=own))


def keep_rejected_line(step: int, group: Group, row: Row, pieces: Pieces, *, reason: str, why: str, drawn_again: bool) -> bytes:
    """Return a line of JSON for a group that is not trained on, as it was played."""
    return wire.encode_json(keep(replace(group, rejected=reason), row, pieces, step=step, columns={}, why=why, drawn_again=drawn_again))


def _is_of(batch: Batch, sequence: int, t: Trajectory) -> bool:
    own = slice(*batch.target_offsets[[sequence, sequence + 1]].tolist())
    tokens, logprobs = batch.tokens[batch.offsets[sequence] : batch.offsets[sequence + 1]], batch.columns.get("rollout_logprobs")
    return np.array_equal(tokens, t.tokens) and (
        logprobs is None or np.array_equal(logprobs[own], t.rollout_logprobs[t.loss_mask], equal_nan=True))


def _keep_trajectory(t: Trajectory, pieces: Pieces, columns: Columns | None) -> KeptTrajectory:
    texts = pieces.split(t.tokens.tolist())
    spread = {name: _spread(values, t.loss_mask) for name, values in (columns or {}).items()}
    return KeptTrajectory(
        tokens=t.tokens.tolist(), loss_mask=t.loss_mask.tolist(), rollout_logprobs=_numbers(t.rollout_logprobs),
        versions=t.versions.tolist(), reward=_number(t.reward), reason=t.reason, num_retries=t.num_retries,
        named_rewards={name: _number(value) for name, value in t.named_rewards.items()}, episode=t.episode,
        agent=_whole(t.agent), turns=tuple(KeptTurn(turn.end, _number(turn.reward), _whole(turn.state), turn.order) for turn in t.turns),
        malformed_calls=t.malformed_calls, text="".join(texts), lengths=[len(text) for text in texts], trained=columns is not None,
        **spread)


def _spread(values: np.ndarray, mask: np.ndarray) -> Numbers:
    """Return L numbers: the values of generated tokens, where `mask` [L] bool is set, and 0 elsewhere."""
    whole = np.zeros(len(mask))
    whole[mask] = values
    return _numbers(whole)


def _numbers(values: np.ndarray) -> Numbers:
    rounded = np.round(values.astype(np.float64), _DIGITS)
    finite = np.isfinite(rounded)
    return rounded.tolist() if finite.all() else [value if known else None for value, known in zip(rounded.tolist(), finite, strict=True)]


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _whole(text: str) -> str:
    """Return text of user code with escapes for lone surrogates, which no file can hold."""
    return text.encode(errors="backslashreplace").decode()
