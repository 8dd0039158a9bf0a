"""Experts that are dealt to ranks with different rows: each rank sends its tokens to the ranks of their experts, and gets the results back.

Called by the trainer before a model is distributed in any other way, before or after its weights are read. A rank of a group of c holds
E / c experts of each layer, each whole: their parameters are DTensors on the group's mesh. Routers and all other layers stay as they are.

In a layer, each rank tells the others how many tokens it has for each of their experts, and sends those tokens' states. The experts compute
on what came from all ranks, and the results go back the same way, where the token's own rank weighs and adds them. The backward pass
exchanges gradients in the opposite direction. Every rank takes part in every exchange, also with nothing to send or to compute; so all
ranks of a group must run equally many forward and backward passes.

Source: GShard, arXiv:2006.16668.
"""

from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from offbeat.errors import ModelError
from offbeat.model.context import exchanged
from offbeat.model.fused_experts import PARTS, find_experts, has_other_experts
from offbeat.model.gathered import whole_twin
from offbeat.model.head import local_part
from offbeat.model.rows import check_rows, probe

_dealt: "WeakSet[nn.Module]" = WeakSet()
"""Modules of experts that `deal_experts` has dealt."""


def dealt_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model whose experts are dealt to ranks with different rows."""
    return [module for module in model.modules() if module in _dealt]


def deal_experts(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Leave this rank its own experts, in place; `mesh` is its group, of one dimension. The model may be one that has no weights yet.

    Raises:
        ModelError: the model has no fused experts of the plain form, or their number is not a multiple of the group's size.
    """
    name, size, found = type(model).__name__, mesh.size(), find_experts(model)
    if has_other_experts(model):
        raise ModelError(f"{name} has experts of a form that cannot be dealt to ranks; set train.parallel.ep to 1")
    if not found:
        raise ModelError(f"{name} has no experts that are fused, which could be dealt to ranks; set train.parallel.ep to 1")
    for module in found.values():
        num_experts = getattr(module, PARTS[0]).shape[0]
        if num_experts % size:
            raise ModelError(f"train.parallel.ep must divide the {num_experts} experts of {name}, got {size}; use a divisor")
    for module in found.values():
        _deal(module, mesh)


def check_dealt(model: PreTrainedModel, mesh: DeviceMesh, *, computes: torch.dtype | None = None) -> None:
    """Compare a model whose experts are dealt with the whole one, on a small row; collective over all ranks that hold parts of it.

    `computes` is as for `offbeat.model.rows.settle_rows`. Raises ModelError if log-probabilities differ.
    """
    check_rows(
        model, probe(model), probe(whole_twin(model)), what=f"with experts over {mesh.size()} ranks", computes=computes)


def _deal(module: Any, mesh: DeviceMesh) -> None:
    for part in PARTS:
        whole = getattr(module, part)
        own = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        dealt = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        module._parameters[part] = nn.Parameter(dealt, requires_grad=whole.requires_grad)
    module.num_experts //= mesh.size()
    _dealt.add(module)
    compute, group = module.forward, mesh.get_group()

    @wraps(compute)
    def dispatch(hidden_TH: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        order = top_k_index.flatten().argsort(stable=True)
        counts = top_k_index.new_zeros(module.num_experts * mesh.size()).scatter_add_(
            0, top_k_index.flatten(), torch.ones_like(top_k_index.flatten()))
        route = _Route.agree(counts, group)
        states_NH = exchanged(hidden_TH[order // top_k_index.shape[1]], group, sent=route.sent, received=route.received)
        results_NH = _computed(module, compute, states_NH, route.experts, num_ranks=mesh.size())
        outputs_NH = exchanged(results_NH, group, sent=route.received, received=route.sent)
        slots = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        outputs_TKH = outputs_NH[slots].view(*top_k_index.shape, -1)
        return (outputs_TKH * top_k_weights[:, :, None]).sum(1).to(hidden_TH.dtype)

    module.forward = torch.compiler.disable(dispatch)


@dataclass(frozen=True, eq=False)
class _Route:
    """How many states go to each rank of a group and come from it, and which of the experts here each of the N that come is for.

    Attributes:
        experts: [N] int64, counted from the first expert here.
    """

    sent: list[int]
    received: list[int]
    experts: Tensor

    @classmethod
    def agree(cls, counts: Tensor, group: dist.ProcessGroup) -> "_Route":
        """Tell the group how many states this rank has for each of all experts, [E] int64; collective."""
        size, came = dist.get_world_size(group), torch.empty_like(counts)
        dist.all_to_all_single(came, counts, group=group)
        sent, received = torch.stack([counts, came]).view(2, size, -1).sum(2).tolist()
        here = torch.arange(len(counts) // size, device=counts.device).repeat(size)
        return cls(sent, received, here.repeat_interleave(came, output_size=sum(received)))


def _computed(module: nn.Module, compute: Any, states_NH: Tensor, experts: Tensor, *, num_ranks: int) -> Tensor:
    """Return the results [N, H] of the experts here, [N] int64; N may be 0.

    The weights' gradient, which comes from the tokens of all ranks, is divided by their number, as others are averaged over ranks.
    """
    held: dict[str, Any] = module._parameters
    kept, num_states = {part: held[part] for part in PARTS}, len(states_NH)
    if not num_states:  # the weights, and what comes before, need their part in the backward pass all the same
        states_NH, experts = states_NH.sum(0, keepdim=True), experts.new_zeros(1)
    for part, parameter in kept.items():
        held[part] = local_part(parameter)
        if held[part].requires_grad:
            held[part].register_hook(lambda gradient: gradient / num_ranks)
    try:
        return compute(states_NH, experts[:, None], states_NH.new_ones(len(states_NH), 1))[:num_states]
    finally:
        held.update(kept)
