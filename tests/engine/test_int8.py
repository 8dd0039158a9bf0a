"""Int8 matrices multiply as whole numbers do, never overflow, and show it if they are not what they were made of."""

import os
import subprocess
import sys

import pytest
import torch

from offbeat.engine import int8
from offbeat.engine.int8 import KERNELS, NARROW, WIDE, Int8Matrices, Int8Matrix, Int8Weight, Kernel, find_kernel, input_factors, is_exact
from offbeat.errors import ModelError


def usable(kernel: type[Kernel]) -> Kernel:
    """The kernel with as many bits as it has room for here; skips a test where this machine lacks it."""
    for top in (WIDE, NARROW):
        try:
            if is_exact(found := kernel(top)):
                return found
        except (RuntimeError, NotImplementedError) as exc:
            pytest.skip(f"{kernel.__name__}: {exc}")
    pytest.skip(f"{kernel.__name__} has no room for 7 bits")


def product_of(x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor, *, top: int) -> torch.Tensor:
    """The sums of whole numbers, one row and one column at a time, [N, O] float64."""
    rows = []
    for row in (x.float() * factors.reciprocal()).double():
        step = row.abs().max() / top
        ints = (row / step).round()
        sums = []
        for column in (weight.float() * factors).double():
            scale = column.abs().max() / 127
            sums.append((ints * (column / scale).round()).sum() * scale * step)
        rows.append(torch.stack(sums))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_products_are_those_of_rounded_numbers(kernel, dtype):
    kernel = usable(kernel)
    torch.manual_seed(0)
    weight, factors, bias = torch.randn(40, 24).to(dtype), torch.rand(24) + 0.5, torch.randn(40).to(dtype)
    matrix = Int8Matrix(weight, factors, kernel)
    for rows in (1, 5, 33):
        x, base = torch.randn(rows, 24).to(dtype), torch.randn(rows, 40).to(dtype)
        before, product = base.clone(), product_of(x, weight, factors, top=kernel.top)
        # A number that lies half-way between two ints may be rounded to either, by one step of one product.
        step = (x.float().abs().amax(1)[:, None] / kernel.top * weight.abs().amax()).double()
        for got, expected in ((matrix(x), product), (matrix(x, bias), product + bias), (matrix.add(base, x), product + base)):
            assert got.dtype == dtype
            assert ((got.double() - expected).abs() <= 1e-4 + step + (0 if dtype == torch.float32 else expected.abs() / 100)).all()
        assert torch.equal(base, before)
        exact = x.double() @ weight.double().t()
        assert (matrix(x).double() - exact).norm() / exact.norm() < (0.02 if kernel.top == WIDE else 0.04)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_a_row_has_the_same_product_beside_any_others(kernel):
    matrix = Int8Matrix(torch.randn(32, 48), torch.ones(48), usable(kernel))
    x = torch.randn(6, 48) * torch.tensor([1e-3, 1.0, 50.0, 1.0, 1e4, 1.0])[:, None]
    for row, product in zip(x, matrix(x), strict=True):
        torch.testing.assert_close(matrix(row[None])[0], product, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_rows_of_zeros_give_zeros_and_numbers_that_are_not_finite_are_not_hidden(kernel):
    kernel = usable(kernel)
    x = torch.randn(4, 16)
    x[1], x[2, 3], x[3, 5] = 0, torch.nan, torch.inf
    product = Int8Matrix(torch.randn(8, 16), torch.ones(16), kernel)(x)
    assert product[0].isfinite().all() and (product[1] == 0).all() and not product[2:].isfinite().any()
    weight = torch.randn(8, 16)
    weight[2, 3], weight[4, 1], weight[6] = torch.nan, torch.inf, 0
    product = Int8Matrix(weight, torch.ones(16), kernel)(x[:1])[0]
    assert product.isfinite().tolist() == [True, True, False, True, False, True, True, True] and product[6] == 0


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_a_matrix_gives_its_numbers_back_to_half_a_step(kernel):
    weight, factors = torch.randn(32, 48), torch.rand(48) + 0.5
    matrix = Int8Matrix(weight, factors, usable(kernel))
    half = (weight * factors).abs().amax(1, keepdim=True) / 127 / 2 / factors
    assert ((matrix.plain - weight).abs() <= half * 1.001).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_digest_covers_every_int_scale_and_factor(kernel):
    kernel = usable(kernel)
    weight, factors = torch.randn(1200, 1000), torch.rand(1000) + 0.5  # larger than what other digests hash as a whole
    same, matrix = (Int8Matrix(weight, factors, kernel) for _ in range(2))
    assert matrix.digest() == same.digest()
    others = [weight.clone() for _ in range(2)]
    others[0][777, 333] += weight[777].abs().max() / 100
    others[1][[5, 6]] = weight[[6, 5]]
    swapped = Int8Matrix(weight, factors, kernel)
    packed = Int8Weight(same._read().ints, same._read().scales[[1, 0, *range(2, 1200)]])
    swapped._packed = kernel.pack(packed)
    shifted = Int8Matrix(weight, factors, kernel)
    shifted._shares = shifted._shares.roll(1)
    spoilt = [*(Int8Matrix(other, factors, kernel) for other in others), swapped, shifted]
    assert len({matrix.digest(), *(other.digest() for other in spoilt)}) == 5


@pytest.mark.parametrize("fault", ["scale", "half", "int"])
def test_a_matrix_that_is_not_what_was_to_be_packed_is_refused_when_it_is_made(fault):
    class Faulty(Kernel):
        def pack(self, weight: Int8Weight) -> object:
            ints, scales = weight.ints.clone(), weight.scales.clone()
            if fault == "scale":
                scales[[0, 1]] = scales[[1, 0]]
            elif fault == "half":
                ints[len(ints) // 2 :] = 0
            else:
                ints[3, 4] += 2
            return kernel.pack(Int8Weight(ints, scales))

        def unpack(self, packed: object) -> Int8Weight:
            return kernel.unpack(packed)

        multiply = None

    kernel = find_kernel()
    with pytest.raises(ModelError, match="int8 weights are not those that were to be quantised"):
        Int8Matrix(torch.randn(16, 16), torch.ones(16), Faulty())


class Plain(Kernel):
    """Exact, and slow."""

    def pack(self, weight: Int8Weight) -> Int8Weight:
        return weight

    def unpack(self, packed: Int8Weight) -> Int8Weight:
        return packed

    def multiply(self, x: torch.Tensor, packed: Int8Weight) -> torch.Tensor:
        return x @ packed.plain.t()


class Narrow(Plain):
    """Multiplies as kernels without VNNI do, which add pairs of products in 16 bits and saturate there."""

    def multiply(self, x: torch.Tensor, packed: Int8Weight) -> torch.Tensor:
        ints = (x * self.top).round() + self.top + 1
        pairs = (ints[:, None] * packed.ints.float()).unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1)
        return (pairs.sum(-1) - (self.top + 1) * packed.ints.float().sum(1)) / self.top * packed.scales


class Wrong(Plain):
    def multiply(self, x: torch.Tensor, packed: Int8Weight) -> torch.Tensor:
        return super().multiply(x, packed) * 1.01


class Missing(Plain):
    def pack(self, weight: Int8Weight) -> Int8Weight:
        raise RuntimeError("Didn't find engine for this operation\nand more")


def test_a_kernel_that_adds_in_16_bits_gets_7_bits(monkeypatch):
    assert not is_exact(Narrow()) and is_exact(Narrow(NARROW))
    monkeypatch.setattr(int8, "KERNELS", (Narrow,))
    assert find_kernel.__wrapped__() == Narrow(NARROW)


@pytest.mark.skipif("x86" not in torch.backends.quantized.supported_engines, reason="instructions are chosen on x86")
@pytest.mark.parametrize("kernel, variable, instructions", [
    ("OneDnn", "ONEDNN_MAX_CPU_ISA", "AVX2"), ("OneDnn", "ONEDNN_MAX_CPU_ISA", "AVX512_CORE"),
    ("Fbgemm", "FBGEMM_ENABLE_INSTRUCTIONS", "AVX2")])
def test_a_kernel_gets_7_bits_on_a_cpu_without_vnni(kernel, variable, instructions):
    code = f"from offbeat.engine.int8 import NARROW, {kernel}, is_exact; print(is_exact({kernel}()), is_exact({kernel}(NARROW)))"
    masked = os.environ | {variable: instructions, "OMP_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, "-c", code], env=masked, capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == ["False", "True"], told.stderr


def test_the_next_kernel_is_taken_where_the_first_is_missing_or_wrong(monkeypatch):
    monkeypatch.setattr(int8, "KERNELS", (Missing, Wrong, Plain))
    assert find_kernel.__wrapped__() == Plain()
    monkeypatch.setattr(int8, "KERNELS", (Missing, Wrong))
    with pytest.raises(ModelError, match=r"int8 matrices \(Missing: Didn't find engine for this operation; Wrong computes wrong sums\)"):
        find_kernel.__wrapped__()


def test_large_inputs_do_not_take_the_bits_of_others():
    torch.manual_seed(0)
    weight, x = torch.randn(64, 128), torch.randn(16, 128)
    x[:, 7] *= 100
    exact, plain = x @ weight.t(), Int8Matrix(weight, torch.ones(128), find_kernel())
    shared = Int8Matrices({"0.qkv": x.abs().amax(0)}).make("0.qkv", weight)
    assert (shared(x) - exact).norm() < 0.3 * (plain(x) - exact).norm()


def test_factors_stay_the_same_for_all_versions_and_are_finite_where_nothing_was_seen():
    matrices = Int8Matrices({"head": torch.tensor([1.0, 4.0, 0.0, 1.0])})
    first, second = (matrices.make("head", torch.randn(8, 4)) for _ in range(2))
    assert torch.equal(first._shares, second._shares)
    for ranges in (torch.zeros(4), torch.full((4,), torch.nan)):
        assert (input_factors(ranges, torch.zeros(8, 4)) == 1).all()
