"""Batches: what they refuse, and that selecting, concatenating and sending keep every sequence whole."""

from dataclasses import replace

import numpy as np
import pytest

from datum_samples import LOSSES_OF_ALL, make_datums, of_adapters
from offbeat.algorithms.objectives import CROSS_ENTROPY, client_loss
from offbeat.data import wire
from offbeat.data.batch import Batch
from offbeat.errors import DataError
from train_samples import PPO, make_batch

SMALL = {
    "tokens": [7, 8, 9], "offsets": [0, 3], "positions": [0, 1, 1], "targets": [8, 5, 6], "columns": {"loss_weights": [1, 1, 1]},
    "sequences": {"group_ids": [0], "prefix_lens": [0]}, "losses": (CROSS_ENTROPY,)}


def rows(batch: Batch) -> list[tuple]:
    """Each sequence's values, one after another; positions count from its start."""
    found = []
    for i in range(len(batch)):
        tokens, own = slice(*batch.offsets[i : i + 2]), slice(*batch.target_offsets[i : i + 2])
        columns = {name: values[own].tolist() for name, values in sorted(batch.columns.items())}
        found.append((
            batch.tokens[tokens].tolist(), (batch.positions[own] - batch.offsets[i]).tolist(), batch.targets[own].tolist(), columns,
            int(batch.prefix_lens[i]), batch.losses[batch.ids("loss_ids")[i]]))
    return found


def assert_equal(got: Batch, expected: Batch) -> None:
    assert rows(got) == rows(expected)
    assert (got.losses, got.adapters, got.denominator) == (expected.losses, expected.adapters, expected.denominator)
    for mine, theirs in zip((got.columns, got.sequences), (expected.columns, expected.sequences), strict=True):
        assert {name: values.dtype for name, values in mine.items()} == {name: values.dtype for name, values in theirs.items()}
        assert {name: values.tolist() for name, values in mine.items()} == {name: values.tolist() for name, values in theirs.items()}


def test_a_selection_holds_the_sequences_in_the_given_order() -> None:
    for batch in (make_batch(3, 2), make_datums(6, seed=1)):
        chosen = batch.select([4, 0, 4])
        assert rows(chosen) == [rows(batch)[i] for i in (4, 0, 4)]
        assert chosen.group_ids.tolist() == batch.group_ids[[4, 0, 4]].tolist()
        empty = batch.select([])
        assert (len(empty), empty.num_tokens, empty.num_targets, empty.lengths.tolist()) == (0, 0, 0, [])


def test_concatenated_parts_keep_their_sequences_and_their_groups_apart() -> None:
    parts = [make_batch(2, 2, seed=1), make_batch(1, 1).select([]), make_batch(3, 1, seed=2)]
    whole = Batch.concatenate(parts)
    assert rows(whole) == [row for part in parts for row in rows(part)]
    assert whole.group_ids.tolist() == [0, 0, 1, 1, 2, 3, 4] and whole.losses == (PPO,)
    np.testing.assert_array_equal(whole.lengths, np.concatenate([part.lengths for part in parts]))
    batch = make_datums(6, seed=1)
    assert rows(Batch.concatenate([batch.select([4, 1]), batch.select([]), batch.select([0])])) == rows(batch.select([4, 1, 0]))


def test_equal_losses_and_adapters_of_two_batches_become_one_and_columns_that_one_lacks_are_zero() -> None:
    one = of_adapters(Batch(**SMALL), ["alice"])
    two = of_adapters(replace(
        one, losses=(client_loss("ppo"), CROSS_ENTROPY), sequences={**one.sequences, "loss_ids": [1]}).with_columns(
            advantages=np.ones(3)), ["bob"])
    joined = Batch.concatenate([one, two, one])
    assert joined.losses == (CROSS_ENTROPY, client_loss("ppo")) and joined.ids("loss_ids").tolist() == [0, 0, 0]
    assert joined.adapters == ("alice", "bob") and joined.ids("adapter_ids").tolist() == [0, 1, 0]
    assert joined.columns["advantages"].tolist() == [0] * 3 + [1] * 3 + [0] * 3


def test_a_batch_crosses_processes() -> None:
    for batch in (make_datums(5), make_datums(5).select([]), of_adapters(make_batch(2, 2), list("abba"))):
        assert_equal(wire.decode(Batch, wire.encode(batch)), batch)


def test_tokens_are_targets_of_the_tokens_before_them() -> None:
    batch = Batch.of_next_tokens(
        np.array([7, 8, 1, 2, 5]), np.array([0, 0, 1, 1, 0]), lengths=[4, 1, 0], columns={"loss_weights": np.arange(5)}, losses=(PPO,))
    assert batch.positions.tolist() == [1, 2] and batch.targets.tolist() == [1, 2]
    assert batch.columns["loss_weights"].tolist() == [2, 3] and batch.target_sequences.tolist() == [0, 0]
    assert batch.target_offsets.tolist() == [0, 2, 2, 2] and batch.group_ids.tolist() == [0, 1, 2] and not batch.prefix_lens.any()
    with pytest.raises(DataError, match="first token of a sequence cannot be trained on"):
        Batch.of_next_tokens(np.array([7, 8]), np.array([1, 1]), lengths=[2], columns={}, losses=())
    with pytest.raises(DataError, match="advantages of a batch must have 2 entries, got 1"):
        Batch.of_next_tokens(np.array([7, 8]), np.array([0, 1]), lengths=[2], columns={"advantages": np.ones(1)}, losses=())


def test_columns_of_whole_sequences_are_read_at_their_targets_wherever_these_lie() -> None:
    masks = [np.array(mask, np.bool_) for mask in ([0, 1, 1, 0, 1], [0, 0, 1, 1], [0, 0], [], [0, 1])]
    tokens = [np.arange(len(mask), dtype=np.int32) + 10 * i for i, mask in enumerate(masks)]
    logprobs = [-sequence.astype(np.float32) for sequence in tokens]
    batch = Batch.of_sequences(
        tokens, masks, columns={"loss_weights": np.ones(6)}, of_tokens={"rollout_logprobs": logprobs}, losses=(PPO,))
    assert batch.targets.tolist() == [1, 2, 4, 12, 13, 41] and batch.positions.tolist() == [0, 1, 3, 6, 7, 11]
    assert batch.columns["rollout_logprobs"].tolist() == (-batch.targets).tolist()


def test_arrays_get_their_types() -> None:
    batch = make_datums(3)
    assert (batch.tokens.dtype, batch.offsets.dtype, batch.positions.dtype, batch.targets.dtype) == (
        np.int32, np.int64, np.int64, np.int32)
    assert {values.dtype for values in batch.columns.values()} == {np.dtype(np.float32)}
    assert {values.dtype for values in batch.sequences.values()} == {np.dtype(np.int64)}
    assert {spec.name for spec in batch.losses} == {spec.name for spec in LOSSES_OF_ALL}


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"tokens": [[7, 8, 9]]}, "tokens of a batch must have one dimension"),
    ({"tokens": [7, 8, 2**31]}, "tokens of a batch must hold whole numbers that fit int32"),
    ({"targets": [8, 5, 6.5]}, "targets of a batch must hold whole numbers that fit int32"),
    ({"offsets": [0, 2]}, "offsets of a batch must rise from 0 to 3"),
    ({"offsets": []}, "offsets of a batch must rise from 0 to 3"),
    ({"positions": [1, 0, 1]}, "positions of a batch's targets must rise"),
    ({"positions": [0, 1, 3]}, r"positions of a batch's targets must be in 0\.\.2, got \[0, 3\]"),
    ({"positions": [0, 1]}, "targets of a batch must have 2 entries, got 3"),
    ({"columns": {"loss_weights": [1.0]}}, "loss_weights of a batch must have 3 entries, got 1"),
    ({"sequences": {"group_ids": [0, 0]}}, "group_ids of a batch must have 1 entries, got 2"),
    ({"sequences": {"loss_ids": [1]}}, r"loss_ids of a batch must be in 0\.\.0, got \[1\]"),
    ({"sequences": {"adapter_ids": [0]}}, r"adapter_ids of a batch must be in 0\.\.-1, got \[0\]"),
])
def test_what_cannot_be_a_batch_is_refused(changes: dict, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        Batch(**{**SMALL, **changes})
