"""Batches of sums over targets: any number of targets at a position, any loss for a sequence."""

from dataclasses import fields, replace

import numpy as np
import pytest

from datum_samples import LOSSES_OF_ALL, make_datums
from offbeat.data import wire
from offbeat.data.datums import LOSSES, DatumBatch, LossSpec
from offbeat.errors import DataError

SMALL = {
    "tokens": [7, 8, 9], "offsets": [0, 3], "target_offsets": [0, 1, 3, 3], "targets": [8, 5, 6], "weights": [1, 1, 1],
    "rollout_logprobs": [0, 0, 0], "advantages": [0, 0, 0], "ratio_mask": [0, 0, 0], "losses": (LossSpec("cross_entropy"),),
    "loss_ids": [0]}


def assert_equal(got, expected):
    for field in fields(DatumBatch):
        mine, theirs = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "losses":
            assert mine == theirs
        else:
            np.testing.assert_array_equal(mine, theirs, err_msg=field.name)
            assert mine.dtype == theirs.dtype


def test_sequences_are_selected_and_joined_with_their_targets_and_losses():
    batch = make_datums(6, seed=1)
    parts = [batch.select([i]) for i in range(len(batch))]
    assert_equal(DatumBatch.concatenate(parts), batch)
    assert_equal(DatumBatch.concatenate([batch.select([4, 1]), batch.select([]), batch.select([0])]), batch.select([4, 1, 0]))
    for i, part in enumerate(parts):
        low, high = batch.offsets[i : i + 2]
        np.testing.assert_array_equal(part.tokens, batch.tokens[low:high])
        for k in range(high - low):
            first, last = batch.target_offsets[low + k : low + k + 2]
            own = slice(*part.target_offsets[k : k + 2])
            np.testing.assert_array_equal(part.targets[own], batch.targets[first:last])
            np.testing.assert_array_equal(part.advantages[own], batch.advantages[first:last])
        assert part.losses[part.loss_ids[0]] == batch.losses[batch.loss_ids[i]]
        assert part.num_targets == np.count_nonzero(batch.target_sequences == i)
    empty = batch.select([])
    assert (len(empty), empty.num_tokens, empty.num_targets, empty.lengths.tolist()) == (0, 0, 0, [])


def test_equal_losses_of_two_batches_become_one():
    one = DatumBatch(**SMALL)
    two = replace(one, losses=(LossSpec.of("ppo"), LossSpec("cross_entropy")), loss_ids=np.array([1]))
    joined = DatumBatch.concatenate([one, two, one])
    assert joined.losses == (LossSpec("cross_entropy"), LossSpec.of("ppo")) and joined.loss_ids.tolist() == [0, 0, 0]


def test_a_batch_crosses_processes():
    for batch in (make_datums(5), make_datums(5).select([])):
        assert_equal(wire.decode(DatumBatch, wire.encode(batch)), batch)


def test_a_loss_has_its_own_defaults_and_takes_only_its_own_constants():
    assert {spec.name for spec in LOSSES_OF_ALL} == set(LOSSES)
    assert LossSpec.of("ppo") == LossSpec("ppo", clip_low=0.8, clip_high=1.2)
    assert LossSpec.of("cispo") == LossSpec("cispo", clip_low=0.0, clip_high=4.0)
    assert LossSpec.of("dro") == LossSpec("dro", beta=0.05)
    assert LossSpec.of("gspo", clip_high=1.5) == LossSpec("gspo", clip_low=0.8, clip_high=1.5)
    for sentence, make in (
        ("there is no loss 'grpo'; use one of cross_entropy, importance_sampling, ppo, cispo, dro, gspo", lambda: LossSpec.of("grpo")),
        ("the loss dro has no constant 'clip_low'; it has beta", lambda: LossSpec.of("dro", clip_low=1.0)),
        ("cross_entropy has no constant 'beta'; it has none", lambda: LossSpec.of("cross_entropy", beta=1.0)),
        ("0 <= low <= high, got 1.5 and 1.2", lambda: LossSpec.of("ppo", clip_low=1.5)),
        ("0 <= low <= high, got 0.8 and inf", lambda: LossSpec.of("ppo", clip_high=np.inf)),
        ("beta of dro must be finite and at least 0, got nan", lambda: LossSpec.of("dro", beta=np.nan)),
    ):
        with pytest.raises(DataError, match=sentence):
            make()


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"tokens": [[7, 8, 9]]}, "tokens must have one dimension"),
    ({"tokens": [7, 8, 2**31]}, "tokens must hold whole numbers that fit int32"),
    ({"targets": [8, 5, 6.5]}, "targets must hold whole numbers that fit int32"),
    ({"offsets": [0, 2]}, "offsets must rise from 0 to 3"),
    ({"offsets": []}, "offsets must rise from 0 to 3"),
    ({"target_offsets": [0, 3, 1, 3]}, "target_offsets must rise from 0 to 3"),
    ({"target_offsets": [0, 1, 3]}, "one entry more than the 3 tokens, got 3"),
    ({"weights": [1.0]}, "weights must have 3 entries, got 1"),
    ({"loss_ids": [0, 0]}, "loss_ids must have 1 entries, got 2"),
    ({"loss_ids": [1]}, r"loss_ids must be in 0\.\.0, got \[1\]"),
    ({"losses": ()}, r"loss_ids must be in 0\.\.-1, got \[0\]"),
    ({"weights": [1, np.nan, 1]}, "weights must be finite, got nan"),
    ({"weights": [1, 1e39, 1]}, "weights must be finite, got inf"),
    ({"advantages": [0, -np.inf, 0]}, "advantages must be finite, got -inf"),
    ({"advantages": [0, 1, 0], "rollout_logprobs": [0, np.nan, 0]}, "rollout_logprobs must be finite, got nan"),
    ({"ratio_mask": [0, 1, 0], "rollout_logprobs": [0, -np.inf, 0]}, "rollout_logprobs must be finite, got -inf"),
])
def test_what_cannot_be_a_batch_is_refused(changes, sentence):
    with pytest.raises(DataError, match=sentence):
        DatumBatch(**{**SMALL, **changes})


def test_a_rollout_logprob_that_no_loss_reads_may_be_anything():
    assert np.isnan(DatumBatch(**{**SMALL, "rollout_logprobs": [np.nan, 0, 0]}).rollout_logprobs[0])
