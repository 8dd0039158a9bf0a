"""A weight in any form multiplies alike and gives its numbers back."""

import pytest
import torch

from offbeat.cpu import this_cpu
from offbeat.engine import matrix as matrix_module
from offbeat.engine.matrix import ByColumns, ByRows, Packed, head_matrix, matrix, packs_in


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [ByColumns, ByRows, Packed])
def test_every_form_multiplies_and_adds_alike_and_gives_its_numbers_back(form, dtype):
    if form is Packed and not packs_in(dtype):
        pytest.skip(f"oneDNN does not pack {dtype} on this CPU, and so neither does the engine")
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    formed = form(weight)
    assert formed.plain.dtype == dtype and torch.equal(formed.plain, weight)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    for rows in (1, 5, 200):
        x, base = torch.randn(rows, 64).to(dtype), torch.randn(rows, 96).to(dtype)
        before = base.clone()
        product = (x.double() @ weight.double().t())
        for got, expected in ((formed(x), product), (formed(x, bias), product + bias), (formed.add(base, x), product + base)):
            torch.testing.assert_close(got.double(), expected, **tolerance)
        assert torch.equal(base, before)


def test_only_large_matrices_are_packed(monkeypatch):
    weight = torch.randn(16, 16)
    assert type(matrix(weight)) is ByColumns and type(head_matrix(weight)) is ByRows
    assert head_matrix(weight).plain is weight, "a tied head takes no memory of its own"
    monkeypatch.setattr(matrix_module, "PACK_FROM", 256)
    assert type(matrix(weight)) is type(head_matrix(weight)) is Packed


def test_a_matrix_of_a_format_that_this_cpu_does_not_pack_is_kept_plain(monkeypatch):
    monkeypatch.setattr(matrix_module, "PACK_FROM", 256)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    for dtype, packed in ((torch.float32, True), (torch.bfloat16, False)):
        weight, x = torch.randn(16, 16).to(dtype), torch.randn(3, 16).to(dtype)
        assert type(matrix(weight)) is (Packed if packed else ByColumns) and type(head_matrix(weight)) is (Packed if packed else ByRows)
        torch.testing.assert_close(matrix(weight)(x).double(), x.double() @ weight.double().t(), atol=0.1, rtol=0.02)


def test_a_cpu_that_has_instructions_for_bfloat16_packs_it():
    assert packs_in(torch.float32) and (packs_in(torch.bfloat16) or not this_cpu().has_bf16)
