"""Values of sequences, over the tokens that count."""

import math

import pytest
import torch

from offbeat.losses.targets import Targets, only

NONE = torch.zeros(6)
COUNTED = torch.tensor([True, False, True, True, False, True])
TARGETS = Targets(NONE, NONE, NONE, NONE, NONE, COUNTED, torch.tensor([0, 0, 0, 1, 2, 3]), {}, num_sequences=4)


@pytest.mark.parametrize(("how", "expected"), [
    ("mean", [1.5, 1.5, 1.5, -4, 0, 2]), ("sum", [3, 3, 3, -4, 0, 2]), ("max", [2, 2, 2, -4, 0, 2])])
@pytest.mark.parametrize("junk", [7.0, math.nan, math.inf])
def test_values_of_a_sequence_are_taken_over_the_targets_that_count(how, expected, junk):
    values = torch.tensor([1.0, junk, 2.0, -4.0, junk, 2.0], dtype=torch.float64)
    assert TARGETS.over_sequences(values, how).tolist() == expected


def test_no_targets_have_no_values():
    none = torch.zeros(0)
    empty = Targets(none, none, none, none, none, none != 0, torch.zeros(0, dtype=torch.int64), {})
    assert all(empty.over_sequences(none, how).shape == (0,) for how in ("mean", "sum", "max"))


def test_values_that_are_left_out_have_no_gradient_even_if_they_are_not_finite():
    values = torch.tensor([1.0, math.nan], requires_grad=True)
    only(torch.tensor([True, False]), values).sum().backward()
    assert values.grad.tolist() == [1.0, 0.0]
