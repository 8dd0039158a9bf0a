"""Which rows operations on adapters may touch; `tests/engines` has vLLM's own do so."""

import importlib

import pytest
import torch
from torch import Tensor

MATRICES = torch.tensor([[[2.0]], [[3.0]]])  # of two places


def add(inputs: Tensor, matrices: Tensor, output: Tensor, indices: Tensor, scale: float) -> None:
    """As vLLM does it: -1 is the last place."""
    output += scale * torch.einsum("bi,boi->bo", inputs, matrices[indices])


@pytest.mark.parametrize(("indices", "expected"), [
    ([0, -1, 1, -1], [21.0, 1.0, 31.0, 1.0]), ([-1] * 4, [1.0] * 4), ([1, 1, 0, 1], [31.0, 31.0, 21.0, 31.0]), ([], [])])
def test_a_row_without_an_adapter_stays_as_it_is(indices: list[int], expected: list[float]) -> None:
    apply = importlib.import_module("vllm_plain").on_adapted_rows(add)
    output = torch.ones(len(indices), 1)
    apply(torch.ones(len(indices), 1), MATRICES, output, torch.tensor(indices, dtype=torch.long), scale=10.0)
    assert output.flatten().tolist() == expected


def test_nothing_of_a_broken_adapter_reaches_a_row_without_one() -> None:
    apply = importlib.import_module("vllm_plain").on_adapted_rows(add)
    output = torch.ones(3, 1)
    apply(torch.ones(3, 1), torch.tensor([[[2.0]], [[float("nan")]]]), output, torch.tensor([-1, 1, 0]), scale=10.0)
    assert output[0] == 1 and output[1].isnan() and output[2] == 21
