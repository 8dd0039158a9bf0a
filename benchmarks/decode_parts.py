"""Where a decode step of the embedded engine spends its time, beside the time of its products alone.

    python benchmarks/decode_parts.py [--quick] [--model .models/smollm2-135m-instruct] [--format float32] [--rows 1 8 64]

One thread decodes samples of 40 to 40 + --steps tokens. A step's parts are timed by the thread's own clock, and medians over steps count,
so that other programs change little but what they do to memory. Products are the layers' matrices and the head; `floor` is how long they
take one after the other in a loop that does nothing else. --format is float32, bfloat16 or int8.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measure import ROOT, note
from torch import Tensor

from offbeat.engine import bag_attention, engine
from offbeat.engine.cache import DecodeStep
from offbeat.engine.direct_weights import MATRICES, DirectWeights, matrices_of
from offbeat.engine.forward_direct import DirectForward
from offbeat.engine.loader import load_engine
from offbeat.engine.matrix import Matrix
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Request, SamplingParams

PARTS = ("products", "attention", "storing keys and values", "norms", "rotary, SwiGLU, rest of the layers", "sampling", "bookkeeping")


class Clock:
    """Seconds of this thread, by part."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Time a function of an object, a class or a module."""
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[part] += time.thread_time() - start

        return run


class TimedMatrix:
    """A matrix whose products are timed."""

    def __init__(self, matrix: Matrix, clock: Clock) -> None:
        self.plain = None
        self.add = clock.timed(matrix.add, "products")
        self._multiply = clock.timed(matrix, "products")

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._multiply(x, bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: one row, a few steps")
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2-135m-instruct")
    parser.add_argument("--format", choices=("float32", "bfloat16", "int8"), default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=48)
    args = parser.parse_args()
    if args.quick:
        args.rows, args.steps = [1], 4
    torch.set_num_threads(1)
    chosen: dict[str, Any] = {"dtype": "float32", "quantization": "int8"} if args.format == "int8" else {"dtype": args.format}
    measured = load_engine(EngineOptions(model=str(args.model), max_running=max(args.rows), prefix_caching=False, **chosen))
    forward = measured._forward
    assert isinstance(forward, DirectForward), "its parts are timed"
    weights, clock = forward._weights, Clock()
    watch(forward, weights, clock)
    columns = [time_steps(measured, clock, rows, args.steps) | {"floor": time_products(weights, forward, rows)} for rows in args.rows]
    titles = [args.format, *(f"{rows} row{'s' * (rows > 1)}" for rows in args.rows)]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for part in PARTS:
        print("| " + " | ".join([part, *(f"{1e3 * each[part]:.2f} ms, {each[part] / each['step']:.0%}" for each in columns)]) + " |")
    for part in ("step", "floor"):
        print("| " + " | ".join([part, *(f"{1e3 * each[part]:.2f} ms" for each in columns)]) + " |")


def watch(forward: DirectForward, weights: DirectWeights, clock: Clock) -> None:
    """Time the parts of a decode step."""
    layers = tuple(replace(layer, **{name: TimedMatrix(getattr(layer, name), clock) for name in MATRICES}) for layer in weights.layers)
    forward.install(replace(weights, layers=layers, head=TimedMatrix(weights.head, clock)))
    for owner, name, part in (
        (bag_attention, "_attend", "attention"), (DecodeStep, "store", "storing"), (forward, "_norm", "norms"),
        (forward, "decode", "decode"), (engine, "sample", "sampling"),
    ):
        clock.watch(owner, name, part)


def time_steps(measured: engine.EmbeddedEngine, clock: Clock, rows: int, steps: int) -> dict[str, float]:
    """Median seconds of each part, and of a step, over decode steps of so many rows."""
    rng = np.random.default_rng(rows)
    for i in range(rows):
        params = SamplingParams(max_new_tokens=steps + 4, ignore_eos=True)
        measured.submit(Request(id=str(i), prompt=rng.integers(1000, 40_000, 40).tolist(), params=params))
    while measured.num_running < rows or measured.num_generated_tokens == 0:
        measured.step()
    seen = []
    for _ in range(steps):
        clock.spent.clear()
        start = time.thread_time()
        measured.step()
        step, spent = time.thread_time() - start, clock.spent
        layers = spent["decode"] - spent["products"] - spent["attention"] - spent["norms"]
        values = (
            spent["products"], spent["attention"] - spent["storing"], spent["storing"], spent["norms"], layers, spent["sampling"],
            step - spent["decode"] - spent["sampling"])
        seen.append(dict(zip(PARTS, values, strict=True)) | {"step": step})
    while measured.has_work:
        measured.step()
    note(f"{rows} rows: {rows / median(each['step'] for each in seen):.0f} tokens per CPU second")
    return {part: median(each[part] for each in seen) for part in seen[0]}


@torch.inference_mode()
def time_products(weights: DirectWeights, forward: DirectForward, rows: int) -> float:
    """Seconds of the products of a step, one after the other."""
    inputs = {
        name: torch.randn(rows, size, dtype=forward.dtype) for name, size in (
            ("qkv", forward.hidden_size), ("out", forward.num_heads * forward.head_dim), ("gate_up", forward.hidden_size),
            ("down", forward.intermediate_size), ("head", forward.hidden_size))}
    seconds = []
    for _ in range(9):
        start = time.thread_time()
        for name, matrix in matrices_of(weights):
            matrix(inputs[name.rpartition(".")[2]])
        seconds.append(time.thread_time() - start)
    return median(seconds)


if __name__ == "__main__":
    main()
