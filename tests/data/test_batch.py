"""Batches: what they refuse, and that selecting and concatenating keep every sequence whole."""

import dataclasses

import numpy as np
import pytest

from offbeat.data.batch import TokenBatch
from offbeat.errors import DataError
from train_samples import make_batch


def rows(batch: TokenBatch) -> list[tuple]:
    """Each sequence's values, one after another."""
    names = ("tokens", "loss_mask", "rollout_logprobs", "advantages", "loss_weights")
    bounds = zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    return [tuple(getattr(batch, name)[low:high].tolist() for name in names) for low, high in bounds]


def test_a_selection_holds_the_sequences_in_the_given_order() -> None:
    batch = make_batch(3, 2)
    chosen = batch.select([4, 0, 4])
    assert rows(chosen) == [rows(batch)[i] for i in (4, 0, 4)]
    assert chosen.group_ids.tolist() == [2, 0, 2]
    assert chosen.prefix_lens.tolist() == [5, 5, 5]
    assert len(batch.select([])) == batch.select([]).num_tokens == 0


def test_concatenated_parts_keep_their_sequences_and_their_groups_apart() -> None:
    parts = [make_batch(2, 2, seed=1), make_batch(1, 1).select([]), make_batch(3, 1, seed=2)]
    whole = TokenBatch.concatenate(parts)
    assert rows(whole) == [row for part in parts for row in rows(part)]
    assert whole.group_ids.tolist() == [0, 0, 1, 1, 2, 3, 4]
    assert whole.num_tokens == sum(part.num_tokens for part in parts)
    np.testing.assert_array_equal(whole.lengths, np.concatenate([part.lengths for part in parts]))


def test_arrays_get_their_types() -> None:
    batch = make_batch(1, 2)
    got = {field.name: getattr(batch, field.name).dtype for field in dataclasses.fields(batch) if field.type is np.ndarray}
    assert got == {
        "tokens": np.int32, "loss_mask": np.bool_, "rollout_logprobs": np.float32, "advantages": np.float32, "loss_weights": np.float32,
        "offsets": np.int64, "group_ids": np.int32, "prefix_lens": np.int32}


def test_arrays_that_do_not_fit_are_refused_with_their_name() -> None:
    batch = make_batch(1, 2)
    with pytest.raises(DataError, match=r"TokenBatch.advantages must have shape"):
        dataclasses.replace(batch, advantages=batch.advantages[1:])
    with pytest.raises(DataError, match="TokenBatch.offsets must rise from 0"):
        dataclasses.replace(batch, offsets=batch.offsets[::-1])
