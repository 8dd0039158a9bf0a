"""What a micro-batch asks of a GPU, counted on fake tensors: operations, bytes, memory, and the MFU that they allow on one kind of device.

Each operation that is not a view counts as a launch. It takes as long as its products take at the device's peak, or as its inputs and
results take to read and write, whichever is longer; nothing overlaps, and no time is added for the launch itself. "bf16" is how one device
computes: under autocast over float32 weights; "shards" has the weights in bfloat16, as FSDP2 gives them to a layer. "before" computes in
float32, has a CPU's chunks in the head, transformers' norms, and no kernel for sequences of many lengths: its attention is counted as that
kernel all the same. "compiled" has the kernels of fused_counts.py in place of its blocks' operations; their memory is not counted.

    python benchmarks/gpu/counts.py [--tokens 16384] [--models 1.7B 8B] [--variants bf16]

It prints one JSON line per row; docs/gpu.md has the table.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from fused_counts import fused_kernels, run_block
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, Qwen3Config

from offbeat.config.train import Recompute
from offbeat.model import attention, head, norm
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


_FREE = frozenset({
    torch.ops.aten._unsafe_view, torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.empty_strided})
"""Operations that touch no memory."""

_PLACING = frozenset({torch.ops.aten.index_put_, torch.ops.aten.index_put})
_PICKING = _PLACING | {torch.ops.aten.index, torch.ops.aten.gather, torch.ops.aten.embedding}
"""Operations that read and write only what they place or pick, and not all that is there."""


@dataclass(frozen=True)
class Variant:
    """How a micro-batch is computed.

    Attributes:
        shards: whether weights are bfloat16, as in shards.
        before: whether it is computed in float32, and as a CPU would.
        compiled: whether blocks are.
    """

    recompute: Recompute = "off"
    shards: bool = False
    before: bool = False
    compiled: bool = False


VARIANTS: dict[str, Variant] = {
    "before": Variant(before=True), "bf16": Variant(), "bf16, selective": Variant("selective"), "bf16, full": Variant("full"),
    "bf16, compiled": Variant(compiled=True), "bf16, shards": Variant(shards=True),
    "bf16, shards, compiled": Variant(shards=True, compiled=True)}


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
        if func.is_view or func.namespace == "prim" or func._overloadpacket in _FREE:
            return result
        given, made = (
            [leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)] for each in ((args, kwargs), result))
        if func._overloadpacket in _PICKING:
            picked = made if func._overloadpacket not in _PLACING else given[-1:]
            size = 2 * sum(leaf.nbytes for leaf in picked) + sum(leaf.nbytes for leaf in given if leaf.dtype == torch.int64)
        else:
            size = sum(leaf.nbytes for leaf in (*given, *made))
        count = flop_registry.get(func._overloadpacket)
        flops = int(count(*args, **(kwargs or {}), out_val=result)) if count else 0
        self.launches += 1
        self.flops, self.num_bytes = self.flops + flops, self.num_bytes + size
        self.roofline_s += max(flops / self._products_per_s, size / BYTES_PER_S)
        return result


def count(name: str, variant: str, num_tokens: int) -> dict[str, Any]:
    """Return the figures of one forward and backward pass over sequences of 1,024 tokens."""
    chosen, config = VARIANTS[variant], model_config(name)
    cost, live = Cost(PEAK_FLOP_PER_S / 2 if chosen.before else PEAK_FLOP_PER_S), LiveBytes()  # float32 runs as TF32
    for mode in (cost, live):
        # A CPU's chunks are more than memory should be counted in.
        num_weights = _run(config, chosen, num_tokens, mode, chunks=head.CPU_SIZES if chosen.before and mode is cost else None)
    useful = flops_of(num_weights, config, [1024] * (num_tokens // 1024))
    found = {
        "model": name, "variant": variant, "tokens": num_tokens, "launches": cost.launches, "bytes_moved": cost.num_bytes,
        "activation_bytes": live.peak, "roofline_s": cost.roofline_s, "roofline_mfu": useful / PEAK_FLOP_PER_S / cost.roofline_s}
    return with_compiled_blocks(found, config, autocasts=not chosen.shards) if chosen.compiled else found


def _run(config: Qwen3Config, variant: Variant, num_tokens: int, mode: Cost | LiveBytes, *, chunks: head.HeadSizes | None) -> int:
    """Run a micro-batch under a mode; returns the number of weights."""
    # There is no autocast for meta tensors, and a fake tensor of a CPU has no numbers either.
    device, dtype = ("meta", torch.bfloat16) if variant.shards else ("cpu", torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED)
    if not variant.before:
        norm.use_fast_norms(model)
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_a_gpu(chunks or head.ACCELERATOR_SIZES):
        model.to_empty(device=device).tie_weights()
        checkpoint_activations(model, variant.recompute)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop)
            if isinstance(mode, LiveBytes):
                mode.ignore(parameter)
        row = packed_tokens(num_tokens, config.vocab_size)
        with mode:
            with torch.autocast("cpu", torch.bfloat16, enabled=not (variant.shards or variant.before)):
                logprobs, _ = token_logprobs(model, row, with_entropy=True)
            logprobs.sum().backward()
    return sum(p.numel() for p in model.parameters())


@contextmanager
def as_on_a_gpu(chunks: head.HeadSizes) -> Iterator[None]:
    """Take the kernels of a GPU for fake tensors of any device."""
    with (
        mock.patch.object(attention, "serves", lambda *_, plain, **__: plain), mock.patch.object(head, "sizes_of", lambda _: chunks),
        mock.patch.object(norm, "fused_norm", lambda x, weight, eps: counted_norm(x, weight.to(x.dtype), eps)[0]),
    ):
        yield


@torch.library.custom_op("offbeat_counts::norm", mutates_args=())
def counted_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Stand for the kernel of `torch.nn.functional.rms_norm` on CUDA: the result, and a number for each row."""
    raise NotImplementedError


@counted_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("offbeat_counts::norm_backward", mutates_args=())
def _counted_norm_backward(grad: Tensor, x: Tensor, scales: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


@_counted_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, scales: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(x), torch.empty_like(weight)


counted_norm.register_autograd(
    lambda ctx, *grads: (*_counted_norm_backward(grads[0], *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1], inputs[1]))


def with_compiled_blocks(row: dict[str, Any], config: Qwen3Config, *, autocasts: bool) -> dict[str, Any]:
    """Return a row of figures with compiled blocks; what a block's attention and all else cost stays."""
    tokens, plain = row["tokens"], Cost()
    with as_on_a_gpu(head.ACCELERATOR_SIZES):
        run_block(config, tokens, autocasts=autocasts, mode=plain)
    kernels, layers = fused_kernels(config, tokens, autocasts=autocasts), config.num_hidden_layers
    assert sum(kernel.flops for kernel in kernels) == plain.flops, "compiled blocks compute the same products"
    seconds = sum(max(kernel.flops / PEAK_FLOP_PER_S, kernel.num_bytes / BYTES_PER_S) for kernel in kernels) - plain.roofline_s
    roofline_s = row["roofline_s"] + layers * seconds
    return row | {
        "launches": row["launches"] + layers * (len(kernels) - plain.launches),
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
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS], choices=VARIANTS)
    args = parser.parse_args()
    for name in args.models:
        for variant in args.variants:
            print(json.dumps(count(name, variant, args.tokens)), flush=True)


if __name__ == "__main__":
    main()
