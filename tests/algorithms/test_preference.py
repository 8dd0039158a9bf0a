"""Batches of preferences, and what held-out ones say of a model, worked out by hand."""

import numpy as np
import pytest

from offbeat.algorithms.experience import split_minibatches
from offbeat.algorithms.preference import answer_values, evaluate_pairs, pair_batch
from offbeat.data.batch import Batch, LossSpec
from offbeat.data.pairs import EncodedPair

DPO = LossSpec("dpo", {"beta": 0.5, "label_smoothing": 0.0})
KTO = LossSpec("kto", {"beta": 0.5, "z": 0.0, "desirable_weight": 1.0, "undesirable_weight": 1.0})


def answer(*tokens: int, prompt: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array(tokens, np.int32), np.arange(len(tokens)) >= prompt


PAIR = EncodedPair((answer(1, 2, 3, prompt=1), answer(1, 4, prompt=1)), (True, False), 0.0, 1)
LONG = EncodedPair((answer(5, 6, 7, 8, prompt=2), answer(5, 6, 9, prompt=2)), (True, False), 0.0, 2)
GOOD = EncodedPair((answer(1, 2, 3, prompt=1),), (True,), 0.0, 0)


def test_a_pair_is_a_group_whose_targets_share_its_weight() -> None:
    batch = pair_batch([PAIR, LONG], DPO, ref_logprobs=np.arange(6, dtype=np.float32))
    assert batch.tokens.tolist() == [1, 2, 3, 1, 4, 5, 6, 7, 8, 5, 6, 9]
    assert batch.targets.tolist() == [2, 3, 4, 7, 8, 9] and batch.positions.tolist() == [0, 1, 3, 6, 7, 10]
    assert batch.group_ids.tolist() == [0, 0, 1, 1] and batch.prefix_lens.tolist() == [1, 1, 2, 2]
    assert batch.sequences["signs"].tolist() == [1, -1, 1, -1] and batch.denominator == 2
    np.testing.assert_allclose(batch.columns["loss_weights"], [1 / 6] * 6)
    assert batch.columns["ref_logprobs"].tolist() == [0, 1, 2, 3, 4, 5]


def test_kto_takes_answers_one_by_one() -> None:
    batch = pair_batch([PAIR, GOOD], KTO)
    assert batch.group_ids.tolist() == [0, 1, 2] and batch.prefix_lens.tolist() == [0, 0, 0]
    np.testing.assert_allclose(batch.columns["loss_weights"], [1 / 6, 1 / 6, 1 / 3, 1 / 6, 1 / 6], rtol=1e-6)
    assert pair_batch([], KTO).num_targets == 0 and len(pair_batch([], DPO)) == 0


def test_pairs_keep_their_signs_in_minibatches_and_when_they_are_joined_again() -> None:
    batch = pair_batch([PAIR, LONG, PAIR], DPO)
    parts = split_minibatches(batch, 2, seed=0)
    assert sorted(len(part) for part in parts) == [2, 4]
    joined = Batch.concatenate(parts)
    for group in np.unique(joined.group_ids):
        assert sorted(joined.sequences["signs"][joined.group_ids == group]) == [-1, 1]


def test_held_out_pairs_by_hand() -> None:
    logprobs, reference = np.array([-1, -2, -1, -3, -3, -4], np.float32), np.array([-2, -2, -1, -2, -2, -1], np.float32)
    values = answer_values([2, 1, 2, 1], logprobs, reference, loss="dpo")
    assert values.tolist() == [1, 0, -2, -3]
    assert answer_values([2, 1, 2, 1], logprobs, reference, loss="ipo").tolist() == [0.5, 0, -1, -3]
    assert answer_values([2, 1, 2, 1], logprobs, None, loss="simpo").tolist() == [-1.5, -1, -3, -4]
    assert evaluate_pairs(values, [PAIR, LONG], DPO).metrics() == {
        "eval/accuracy": 1.0, "eval/margin_mean": 0.5, "eval/chosen_logratio_mean": -0.5, "eval/rejected_logratio_mean": -1.5}


def test_labelled_answers_are_compared_good_with_bad() -> None:
    evaluation = evaluate_pairs(np.array([1.0, 0.0, -1.0]), [PAIR, GOOD], KTO)
    assert (evaluation.accuracy, evaluation.margin, evaluation.chosen, evaluation.rejected) == (0.5, pytest.approx(0.0), 0.0, 0.0)
    alone = evaluate_pairs(np.array([1.0]), [GOOD], KTO)
    assert (alone.accuracy, alone.rejected) == (0.0, None) and "eval/rejected_logratio_mean" not in alone.metrics()
