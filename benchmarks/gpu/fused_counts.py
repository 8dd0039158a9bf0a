"""What a compiled decoder block asks of a device: the kernels that Inductor makes of it, with their products and their bytes.

Used by counts.py. A block is compiled as `train.compile` does, but for a CPU, and up to the point where code would be generated: a
buffer that a kernel reads or writes counts once, and what it keeps to itself not at all. For a GPU Inductor may fuse other operations than
for a CPU, but it cannot be asked where there is none. Attention, which is not compiled, is left out.

A block is compiled for two small numbers of tokens, since it also runs; every kernel's bytes and products grow linearly with them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    _recursive_record_original_output_strides,
    compile_fx,
    fake_tensor_prop,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config

from offbeat.model.blocks import round_rotations
from offbeat.model.norm import use_fast_norms

_SMALL = (128, 256)
"""Numbers of tokens for which a block is compiled."""

_APART = "not_counted"


@dataclass(frozen=True)
class Kernel:
    """One kernel, or one call of a library, for a number of tokens."""

    flops: float
    num_bytes: float


def fused_kernels(config: Qwen3Config, num_tokens: int, *, autocasts: bool) -> list[Kernel]:
    """Return the kernels of a block's forward and backward pass in bfloat16; see `run_block`."""
    few, more = found = list[Kernel](), list[Kernel]()
    for tokens, kernels in zip(_SMALL, found, strict=True):
        torch._dynamo.reset()

        def compiled(layer: Any, kernels: list[Kernel] = kernels) -> None:
            layer.compile(dynamic=False, backend=_noting(kernels))

        with torch._inductor.config.patch(reorder_for_peak_memory=False):  # which may order them differently for each number
            run_block(config, tokens, autocasts=autocasts, prepare=compiled)
    assert [2 * kernel.flops for kernel in few] == [kernel.flops for kernel in more], "the kernels are the same for any number of tokens"
    share = (num_tokens - _SMALL[0]) / (_SMALL[1] - _SMALL[0])
    return [Kernel(one.flops + share * (two.flops - one.flops), one.num_bytes + share * (two.num_bytes - one.num_bytes))
            for one, two in zip(few, more, strict=True)]


def run_block(
    config: Qwen3Config, num_tokens: int, *, autocasts: bool, prepare: Callable[[Any], object] = lambda _: None,
    mode: AbstractContextManager | None = None,
) -> None:
    """Run a block forward and backward on random weights, without what is done in attention.

    Args:
        autocasts: whether weights and inputs are float32, and the block runs under autocast; otherwise they are bfloat16.
        prepare: is given the block first.
        mode: is entered around both passes, which then run on fake tensors.
    """
    AttentionInterface.register(_APART, torch.compiler.disable(_attend))
    small = type(config)(**config.to_dict() | {"num_hidden_layers": 1, "layer_types": None, "vocab_size": 2, "use_cache": False})
    dtype = torch.float32 if autocasts else torch.bfloat16
    with torch.device("cpu" if mode is None else "meta"):
        whole: Any = AutoModelForCausalLM.from_config(small, dtype=dtype, attn_implementation=_APART)
    use_fast_norms(whole)
    round_rotations([whole.model.layers[0]])
    with nullcontext() if mode is None else FakeTensorMode(allow_non_fake_inputs=True):
        # There is no autocast for meta tensors; without autocast, a CPU has other norms than they.
        where = torch.device("cpu" if mode is None or autocasts else "meta")
        if mode is not None:
            whole.to_empty(device=where)
        states = torch.zeros(1, num_tokens, config.hidden_size, dtype=dtype, device=where, requires_grad=True)
        rotary = whole.model.rotary_emb(states, torch.arange(num_tokens, device=where)[None])
        layer, gradient = whole.model.layers[0].train(), torch.ones_like(states)
        prepare(layer)
        with mode or nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                result = layer(states, position_embeddings=rotary, attention_mask=None, use_cache=False)
            result.backward(gradient)


class _Nothing(torch.autograd.Function):
    """Gives what has the form of attention's result, and gradients that have the form of its inputs, at no cost."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.shapes = query.shape, key.shape, value.shape
        with _disable_current_modes():
            return torch.ones_like(query).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return ones."""
        with _disable_current_modes():
            return tuple(grads[0].new_ones(shape) for shape in ctx.shapes)


def _attend(_module: object, query: Tensor, key: Tensor, value: Tensor, _mask: object, **_: object) -> tuple[Tensor, None]:
    query, key, value = (each.to(torch.bfloat16) for each in (query, key, value))  # as `packed_attention` does
    return _Nothing.apply(query, key, value), None


def _noting(kernels: list[Kernel]) -> Callable[[GraphModule, Sequence[Tensor]], Any]:
    """Return a backend that does all that Inductor does up to the generation of code, notes what would be generated, and runs the graph."""

    def lower(graph: GraphModule, inputs: Sequence[Tensor], **settings: Any) -> Callable[[list[Any]], list[Any]]:
        runs, backward = deepcopy(graph), bool(settings.get("is_backward"))
        view_to_reshape(graph)
        with torch.no_grad():
            fakes = fake_tensor_prop(graph, inputs)
        _recursive_record_original_output_strides(graph)
        with V.set_fake_mode(fakes):
            _recursive_post_grad_passes(graph, is_inference=False)
            lowering = GraphLowering(graph, example_inputs=inputs, is_backward=backward)
            with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
                lowering.run(*inputs)
                lowering.init_wrapper_code()
                lowering._update_scheduler()
                kernels.extend(_kernel(node) for node in lowering.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode))
        return make_boxed_func(runs)

    return lambda graph, inputs: compile_fx(graph, inputs, inner_compile=lower)  # pyright: ignore[reportArgumentType]


def _kernel(node: Any) -> Kernel:
    flops = 0
    if isinstance(node, ExternKernelSchedulerNode) and (origin := node.node.get_origin_node()):  # pyright: ignore[reportOptionalMemberAccess]
        counts: Any = flop_registry.get(getattr(origin.target, "overloadpacket", None))
        flops = 0 if counts is None else counts(*(each.meta["val"] for each in origin.args), out_val=origin.meta["val"])
    return Kernel(int(flops), node.get_read_write_buffers_sizes())
