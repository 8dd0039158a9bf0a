"""Rounding a layer's weights, against numbers that are computed by hand."""

import importlib

import pytest
import torch

FORMS = {"int8": 127, "int4": 8, "fp8": 448}


def test_whole_numbers_of_8_bits_have_a_scale_for_each_row() -> None:
    rounded = importlib.import_module("rounding").round_matrix("int8", torch.tensor([[1.0, -0.5, 0.25], [0, 0, 0], [-254, 127, 3]]))
    assert rounded.numbers.tolist() == [[127, -64, 32], [0, 0, 0], [-127, 64, 2]]
    assert rounded.scales.flatten().tolist() == pytest.approx([1 / 127, 0, 2])


def test_the_largest_of_32_numbers_becomes_minus_8_in_4_bits() -> None:
    weight = torch.zeros(1, 64, dtype=torch.bfloat16)
    weight[0, :3], weight[0, 32:35] = torch.tensor([4.0, -2.0, 0.7]), torch.tensor([-8.0, 7.0, 7.9])
    rounded = importlib.import_module("rounding").round_matrix("int4", weight)
    assert rounded.scales.tolist() == [[-0.5, 1.0]] and rounded.scales.dtype == torch.bfloat16
    assert rounded.numbers[0, :3].tolist() == [-8, 4, -1] and rounded.numbers[0, 32:35].tolist() == [-8, 7, 7]
    assert rounded.columns(torch.tensor([0, 1, 33])).tolist() == [[4.0, -2.0, 7.0]]


def test_8_bit_floats_reach_448_and_inputs_of_other_workers_count_for_the_scale() -> None:
    weight = torch.tensor([[448.0, 17.0, 1.0, 896.0]])
    whole, share = (importlib.import_module("rounding").round_matrix("fp8", weight, **own) for own in ({}, {"first": 1, "width": 2}))
    assert whole.scales.tolist() == share.scales.tolist() == [[2.0]]
    assert (whole.numbers.float().tolist(), share.numbers.float().tolist()) == ([[224.0, 8.0, 0.5, 448.0]], [[8.0, 0.5]])


@pytest.mark.parametrize("form", FORMS)
def test_what_a_rounded_matrix_stands_for_is_near_the_matrix(form: str) -> None:
    random = torch.Generator().manual_seed(0)
    weight, signs = torch.randn(6, 64, generator=random).bfloat16(), torch.randint(0, 2, (3, 64), generator=random) * 2.0 - 1
    rounded = importlib.import_module("rounding").round_matrix(form, weight)
    plain = rounded.columns(torch.arange(64))
    steps = weight.float().abs().amax(1, keepdim=True) / (14 if form == "fp8" else FORMS[form])  # between 256 and 448 in steps of 32
    assert ((plain - weight.float()).abs() <= steps * (1.01 if form == "int4" else 0.51)).all()
    assert torch.allclose(rounded.signed_sums(signs), plain.double() @ signs.double().T, atol=1e-5)
