"""What a micro-batch asks of a GPU, counted on fake tensors: operations, bytes, memory, and the MFU that they allow on one kind of device.

Each operation that is not a view counts as a launch. It takes as long as its products take at the device's peak, or as its inputs and
results take to read and write, whichever is longer; nothing overlaps, and no time is added for the launch itself. "before" has float32
weights, a CPU's chunks in the head, and no kernel for sequences of many lengths: its attention is counted as that kernel all the same.
"bf16, compiled" has the kernels of fused_counts.py in place of its blocks' operations; their memory is not counted.

    python benchmarks/gpu/counts.py [--tokens 16384] [--models 1.7B 8B] [--variants bf16]

It prints one JSON line per row; docs/gpu.md has the table.
"""

import argparse
import json
from typing import Any

import torch
from fused_counts import fused_kernels, run_block
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, Qwen3Config

from offbeat.config.train import Recompute
from offbeat.model import head
from offbeat.model.attention import PACKED
from offbeat.model.blocks import checkpoint_activations
from offbeat.model.logprobs import token_logprobs
from offbeat.trainer.memory import LiveBytes, packed_tokens

PEAK_FLOP_PER_S, BYTES_PER_S = 989e12, 3.35e12
"""Of an H100 SXM: dense bfloat16 products, and its memory."""

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128,
             "tie_word_embeddings": True, "vocab_size": 512},
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
             "tie_word_embeddings": True},
    "1.7B": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 6144,
             "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288,
           "tie_word_embeddings": False},
}

VARIANTS: dict[str, tuple[torch.dtype, Recompute]] = {
    "before": (torch.float32, "off"), "bf16": (torch.bfloat16, "off"), "bf16, selective": (torch.bfloat16, "selective"),
    "bf16, full": (torch.bfloat16, "full")}


COMPILED = "bf16, compiled"


def model_config(name: str) -> Qwen3Config:
    """Return the configuration of a Qwen3 of this size."""
    return Qwen3Config(**{"vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960} | SHAPES[name])


class Cost(TorchDispatchMode):
    """Adds up what operations cost.

    Attributes:
        launches: number of operations that are no views.
        flops: floating-point operations of products and attention.
        num_bytes: read and written.
        roofline_s: time of all operations, one after the other.
    """

    def __init__(self, products_per_s: float = PEAK_FLOP_PER_S) -> None:
        super().__init__()
        self.launches, self.flops, self.num_bytes, self.roofline_s = 0, 0, 0, 0.0
        self._products_per_s = products_per_s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count one operation."""
        result = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace == "prim" or func is torch.ops.aten._unsafe_view.default:
            return result
        size = sum(leaf.nbytes for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor))
        count = flop_registry.get(func._overloadpacket)
        flops = int(count(*args, **(kwargs or {}), out_val=result)) if count else 0
        self.launches += 1
        self.flops, self.num_bytes = self.flops + flops, self.num_bytes + size
        self.roofline_s += max(flops / self._products_per_s, size / BYTES_PER_S)
        return result


def count(name: str, variant: str, num_tokens: int) -> dict[str, Any]:
    """Return the figures of one forward and backward pass over sequences of 1,024 tokens."""
    if variant == COMPILED:
        return compiled(count(name, "bf16", num_tokens))
    dtype, recompute = VARIANTS[variant]
    sizes = head.ACCELERATOR_SIZES
    config = model_config(name)
    try:
        costs = []
        for mode in (Cost(PEAK_FLOP_PER_S if dtype == torch.bfloat16 else PEAK_FLOP_PER_S / 2), LiveBytes()):  # float32 runs as TF32
            before = variant == "before" and isinstance(mode, Cost)
            head.ACCELERATOR_SIZES = head.CPU_SIZES if before else sizes
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED)
            with FakeTensorMode(allow_non_fake_inputs=True):
                model.to_empty(device="meta").tie_weights()
                checkpoint_activations(model, recompute)
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(_drop)
                    if isinstance(mode, LiveBytes):
                        mode.ignore(parameter)
                with mode:
                    logprobs, _ = token_logprobs(model, packed_tokens(num_tokens, config.vocab_size), with_entropy=True)
                    logprobs.sum().backward()
            costs.append(mode)
    finally:
        head.ACCELERATOR_SIZES = sizes
    cost, live = costs
    useful = flops_of(sum(p.numel() for p in model.parameters()), config, [1024] * (num_tokens // 1024))
    return {
        "model": name, "variant": variant, "tokens": num_tokens, "launches": cost.launches, "bytes_moved": cost.num_bytes,
        "activation_bytes": live.peak, "roofline_s": cost.roofline_s, "roofline_mfu": useful / PEAK_FLOP_PER_S / cost.roofline_s}


def compiled(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of figures with compiled blocks; what a block's attention and all else cost stays."""
    config, tokens, plain = model_config(row["model"]), row["tokens"], Cost()
    run_block(config, tokens, device="meta", mode=plain)
    kernels, layers = fused_kernels(config, tokens), config.num_hidden_layers
    assert sum(kernel.flops for kernel in kernels) == plain.flops, "compiled blocks compute the same products"
    seconds = sum(max(kernel.flops / PEAK_FLOP_PER_S, kernel.num_bytes / BYTES_PER_S) for kernel in kernels) - plain.roofline_s
    roofline_s = row["roofline_s"] + layers * seconds
    return row | {
        "variant": COMPILED, "launches": row["launches"] + layers * (len(kernels) - plain.launches),
        "bytes_moved": row["bytes_moved"] + layers * round(sum(kernel.num_bytes for kernel in kernels) - plain.num_bytes),
        "activation_bytes": None, "roofline_s": roofline_s, "roofline_mfu": row["roofline_mfu"] * row["roofline_s"] / roofline_s}


def flops_of(num_parameters: int, config: Qwen3Config, lengths: list[int]) -> float:
    """Return the floating-point operations that a pass over sequences of these lengths is for: 6 N per token, and causal attention."""
    tied = config.tie_word_embeddings
    products = num_parameters - (0 if tied else config.vocab_size * config.hidden_size)  # looking up embeddings multiplies nothing
    width = config.num_attention_heads * config.head_dim
    return 6.0 * products * sum(lengths) + 6.0 * config.num_hidden_layers * width * sum(length**2 for length in lengths)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--models", nargs="+", default=["1.7B", "8B"], choices=SHAPES)
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS, COMPILED], choices=[*VARIANTS, COMPILED])
    args = parser.parse_args()
    for name in args.models:
        for variant in args.variants:
            print(json.dumps(count(name, variant, args.tokens)), flush=True)


if __name__ == "__main__":
    main()
