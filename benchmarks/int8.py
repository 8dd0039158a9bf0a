"""Int8 weights against float32: products of a decode step by several kernels, and the whole embedded engine.

The matrices have the shapes of SmolLM2-135M and random numbers: 30 layers of fused projections, and the head. A figure is CPU seconds of
all products of one token step, on one thread; the product alone counts, without norms and attention. Kernels that this CPU lacks are named.

    python benchmarks/int8.py [--quick] [--repeats 3]
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 FBGEMM_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/int8.py    # as with AVX2 alone
    python benchmarks/int8.py --engine .models/smollm2-135m-instruct [--rows 1 8 16 64]

Weights have one scale per output, -127 to 127. A line per kernel and number of rows on stderr says the relative error of the product.
"engine" is what the engine itself has: a scale for each row of activations, where `linear_dynamic` has one for all.

With --engine the embedded engine decodes random prompts of 16 tokens, with `quantization` none and int8 in turns: figures are generated
tokens per CPU second of decoding, sampler and log-probabilities included, and prefill left out, on one thread.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, cast

import torch
from measure import emit, note, take_turns
from torch import Tensor

from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.int8 import Int8Matrices
from offbeat.engine.loader import load_engine
from offbeat.engine.matrix import head_matrix, matrix
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import SamplingParams

LAYERS = 30
SHAPES = {"qkv": (960, 576), "out": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
AIM = 2.0
_TOKENS = 128
"""Tokens that an engine decodes in a round, at least 8 for each sample."""

Product = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: one round, and two numbers of rows")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the median counts (default: 3)")
    parser.add_argument("--engine", metavar="MODEL", help="measure the whole engine, with this model folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64], help="samples that --engine decodes together")
    args = parser.parse_args()
    torch.set_num_threads(1)
    note(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.backends.quantized.engine}")
    repeats = 1 if args.quick else args.repeats
    if args.engine:
        measure_engines(args.engine, rows=args.rows[:1] if args.quick else args.rows, repeats=repeats)
    else:
        measure_products((1, 8) if args.quick else (1, 2, 4, 8, 16, 32), repeats=repeats)


def measure_engines(model: str, *, rows: Sequence[int], repeats: int) -> None:
    """Let engines of both forms decode in turns."""
    forms: tuple[Literal["none", "int8"], ...] = ("none", "int8")
    engines = {form: load_engine(EngineOptions(model=model, quantization=form, prefix_caching=False)) for form in forms}
    for count in rows:
        sides = {form: partial(_decode, engine, count) for form, engine in engines.items()}
        figures = take_turns(sides, repeats=repeats, what=f"{count} rows")
        emit("int8", f"engine, {count} rows", ours=figures["int8"]["tokens_per_cpu_s"], peer=figures["none"]["tokens_per_cpu_s"],
             unit="tokens/CPU s", aim=AIM if count <= 8 else None)


def _decode(engine: EmbeddedEngine, count: int, repeat: int) -> Mapping[str, float]:
    """Decode `count` samples at once, and subtract what their prompts and first tokens took."""
    length = max(_TOKENS // count, 8)
    generator = torch.Generator().manual_seed(repeat)
    prompts = torch.randint(100, 1000, (count, 16), generator=generator).tolist()
    seconds = []
    for most in (1, 1 + length):
        start_s = time.process_time()
        engine.generate(prompts, SamplingParams(max_new_tokens=most, ignore_eos=True, seed=repeat))
        seconds.append(time.process_time() - start_s)
    return {"tokens_per_cpu_s": count * length / (seconds[1] - seconds[0])}


def measure_products(rows: Sequence[int], *, repeats: int) -> None:
    """Let all kernels multiply in turns."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}
    for count in rows:
        inputs = {name: torch.randn(count, shape[1], generator=generator) for name, shape in SHAPES.items()}
        peer = {name: head_matrix(weight) if name == "head" else matrix(weight) for name, weight in weights.items()}
        kernels: dict[str, Mapping[str, Product]] = {"float32": cast(Mapping[str, Product], peer)}
        for kernel, prepare in KERNELS.items():
            try:
                kernels[kernel] = {name: prepare(weight) for name, weight in weights.items()}
                note(f"{kernel}, {count} rows: relative error {_error(kernels[kernel], kernels['float32'], inputs):.4f}")
            except (RuntimeError, NotImplementedError) as exc:
                kernels.pop(kernel, None)
                note(f"{kernel}: not on this CPU: {str(exc).splitlines()[0]}")
        sides = {kernel: partial(_measure, products, inputs) for kernel, products in kernels.items()}
        figures = take_turns(sides, repeats=repeats, what=f"{count} rows")
        for kernel in list(kernels)[1:]:
            emit("int8", f"{kernel}, {count} rows", ours=figures[kernel]["cpu_s"], peer=figures["float32"]["cpu_s"], unit="CPU s",
                 aim=AIM if count <= 8 else None, less_is_better=True)


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


def of_engine(weight: Tensor) -> Product:
    """The embedded engine's own int8 matrix."""
    return Int8Matrices({"": torch.ones(weight.shape[1])}).make("", weight)


KERNELS = {"engine": of_engine, "linear_dynamic": linear_dynamic, "int_mm": int_mm, "weight_int8pack_mm": weight_int8pack_mm}


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
