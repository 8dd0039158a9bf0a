"""Products of a decode step with int8 weights and dynamic activations, by each of torch's kernels, with the engine's float32 matrices.

The matrices have the shapes of SmolLM2-135M and random numbers: 30 layers of fused projections, and the head. A figure is CPU seconds of
all products of one token step, on one thread; the product alone counts, without norms and attention. Kernels that this CPU lacks are named.

    python benchmarks/int8.py [--quick] [--repeats 3]
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/int8.py    # FBGEMM, behind linear_dynamic, is not masked by these

Weights have one scale per output, -127 to 127. A line per kernel and number of rows on stderr says the relative error of the product.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
from measure import emit, note, take_turns
from torch import Tensor

from offbeat.engine.matrix import head_matrix, matrix

LAYERS = 30
SHAPES = {"qkv": (960, 576), "out": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
AIM = 2.0

Product = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: one round, and two numbers of rows")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the median counts (default: 3)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    note(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.backends.quantized.engine}")
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}
    for rows in (1, 8) if args.quick else (1, 2, 4, 8, 16, 32):
        inputs = {name: torch.randn(rows, shape[1], generator=generator) for name, shape in SHAPES.items()}
        peer = {name: head_matrix(weight) if name == "head" else matrix(weight) for name, weight in weights.items()}
        kernels: dict[str, Mapping[str, Product]] = {"float32": cast(Mapping[str, Product], peer)}
        for kernel, prepare in KERNELS.items():
            try:
                kernels[kernel] = {name: prepare(weight) for name, weight in weights.items()}
                note(f"{kernel}, {rows} rows: relative error {_error(kernels[kernel], kernels['float32'], inputs):.4f}")
            except (RuntimeError, NotImplementedError) as exc:
                kernels.pop(kernel, None)
                note(f"{kernel}: not on this CPU: {str(exc).splitlines()[0]}")
        sides = {kernel: partial(_measure, products, inputs) for kernel, products in kernels.items()}
        figures = take_turns(sides, repeats=1 if args.quick else args.repeats, what=f"{rows} rows")
        for kernel in list(kernels)[1:]:
            emit("int8", f"{kernel}, {rows} rows", ours=figures[kernel]["cpu_s"], peer=figures["float32"]["cpu_s"], unit="CPU s",
                 aim=AIM if rows <= 8 else None, less_is_better=True)


def linear_dynamic(weight: Tensor) -> Product:
    """`quantized.linear_dynamic`, one scale for all activations; reduced to 7 bits, since without VNNI 8 bits overflow 16-bit sums."""
    scale = _scale(weight)
    quantised = torch.quantize_per_channel(weight, scale.double(), torch.zeros(len(weight), dtype=torch.int64), 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantised, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, True)


def int_mm(weight: Tensor) -> Product:
    """`_int_mm`, one scale for each row of activations."""
    scale = _scale(weight)
    columns = (weight / scale[:, None]).round().to(torch.int8).t().contiguous()

    def product(x: Tensor) -> Tensor:
        step = x.abs().amax(1, keepdim=True) / 127
        return torch._int_mm((x / step).round().to(torch.int8), columns).float() * step * scale

    return product


def weight_int8pack_mm(weight: Tensor) -> Product:
    """`_weight_int8pack_mm`: the weights alone are int8, activations bfloat16, in which it is quickest."""
    scale = _scale(weight)
    rows = (weight / scale[:, None]).round().to(torch.int8)
    return lambda x: torch._weight_int8pack_mm(x.bfloat16(), rows, scale.bfloat16()).float()


KERNELS = {"linear_dynamic": linear_dynamic, "int_mm": int_mm, "weight_int8pack_mm": weight_int8pack_mm}


def _scale(weight: Tensor) -> Tensor:
    return weight.abs().amax(1) / 127


def _error(products: Mapping[str, Product], exact: Mapping[str, Product], inputs: Mapping[str, Tensor]) -> float:
    return max(float((products[name](x) - exact[name](x)).norm() / exact[name](x).norm()) for name, x in inputs.items())


def _measure(products: Mapping[str, Product], inputs: Mapping[str, Tensor], _: int) -> Mapping[str, float]:
    """Time a step: the layers' products one after the other, so that a layer's weights are out of the caches when it comes again."""
    start_s = time.process_time()
    for _ in range(LAYERS):
        for name in ("qkv", "out", "gate_up", "down"):
            products[name](inputs[name])
    products["head"](inputs["head"])
    return {"cpu_s": time.process_time() - start_s}


if __name__ == "__main__":
    main()
