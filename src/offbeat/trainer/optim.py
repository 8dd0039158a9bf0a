"""AdamW for a model's parameters, or for the rows of a matrix."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.adamw import adamw

from offbeat.algorithms.adam import AdamParams
from offbeat.model.lora import doubled
from offbeat.trainer.offload import OffloadedAdamW


def build_optimizer(model: nn.Module, *, offloads: bool = False) -> torch.optim.AdamW:
    """Build a fused AdamW, whose moments lie in host memory if it `offloads` them; `set_params` sets the parameters of its steps."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]]
    filled = [{"params": group} for group in groups if group]
    return OffloadedAdamW(filled) if offloads else MeshAdamW(filled, fused=True)


class MeshAdamW(torch.optim.AdamW):
    """AdamW for parameters on several meshes, which torch's kernels for many tensors take one mesh at a time; its groups do not show it."""

    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        kept = self.param_groups
        self.param_groups = [group | {"params": part} for group in kept for part in by_mesh(group["params"])]
        try:
            return super().step(closure)
        finally:
            self.param_groups = kept


def by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Sort parameters by the mesh that they are on, or none."""
    parts: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        parts.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(parts.values())


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients, [] float; collective for DTensors, of which each element counts once."""
    norms = [get_total_norm(part) for part in by_mesh([p.grad for p in parameters if p.grad is not None]) or [[]]]
    wholes = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return wholes[0] if len(wholes) == 1 else torch.linalg.vector_norm(torch.stack(wholes))


def clip_gradients(parameters: Iterable[Tensor], *, clip_norm: float, norm: Tensor) -> None:
    """Scale all gradients, whose `norm` is [] float, so that it becomes at most `clip_norm`."""
    for part in by_mesh(parameters):
        clip_grads_with_norm_(part, clip_norm, norm)


def set_params(optimizer: torch.optim.Optimizer, params: AdamParams) -> None:
    """Set the parameters of the next step; weight decay excludes norms and biases, the parameters of one dimension."""
    for group in optimizer.param_groups:
        decay = params.weight_decay if group["params"][0].ndim > 1 else 0.0
        group.update(lr=params.lr, betas=(params.beta1, params.beta2), eps=params.eps, weight_decay=decay)


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no value is NaN or infinite; of a DTensor, such as [V, H], this rank's part counts. Waits for the device."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    filled = [tensor for tensor in local if tensor.numel()]
    if all(tensor.is_cpu for tensor in filled):  # there the norm takes 15 times as long
        return all(math.isfinite(end) for tensor in filled for end in map(float, torch.aminmax(tensor)))  # of NaN both ends are NaN
    largest = torch._foreach_norm(filled, float("inf"))  # of NaN it is NaN
    return bool(torch.stack([norm.float() for norm in largest]).isfinite().all())


class RowAdam:
    """AdamW in which every row has its own moments, step count and settings; rows that are not updated keep every bit.

    Attributes:
        exp_avg, exp_avg_sq: [N, P] float32, the moments.
        steps: [N] float32, number of updates.
    """

    def __init__(self, weights: Tensor) -> None:
        """`weights` is [N, P] float32, and is updated in place."""
        self._weights = weights
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(weights), torch.zeros_like(weights)
        self.steps = torch.zeros(len(weights), device=weights.device)
        self._kept: tuple[Tensor, ...] = ()  # room for a row of each state; new memory each time would take longer than copying

    @torch.no_grad()
    def update(self, row: int, gradient: Tensor, params: AdamParams, *, norm: float) -> None:
        """Update one row by `gradient`, [P] float32, which is clipped in place; `norm` is its norm."""
        if params.clip_norm:  # as torch's clip_grads_with_norm_ does it, to the last bit
            gradient.mul_((params.clip_norm / (torch.tensor(norm, device=gradient.device) + 1e-6)).clamp(max=1.0))
        adamw(
            [self._weights[row]], [gradient], [self.exp_avg[row]], [self.exp_avg_sq[row]], [], [self.steps[row]], fused=True, amsgrad=False,
            beta1=params.beta1, beta2=params.beta2, lr=params.lr, weight_decay=params.weight_decay, eps=params.eps, maximize=False)

    @torch.no_grad()
    def try_update(self, row: int, gradient: Tensor, params: AdamParams, *, norm: float) -> bool:
        """Update one row by `gradient` [P], unless a value of it became NaN or infinite. Returns whether it is updated."""
        states = (self._weights, self.exp_avg, self.exp_avg_sq, self.steps)
        if not self._kept:
            self._kept = tuple(torch.empty_like(state[row]) for state in states)
        for state, kept in zip(states, self._kept, strict=True):
            kept.copy_(state[row])
        self.update(row, gradient, params, norm=norm)
        if all_finite([self._weights[row]]):
            return True
        for state, kept in zip(states, self._kept, strict=True):
            state[row] = kept
        return False

    def set(self, row: int, *, exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> None:
        """Set the moments, [P] float32, and the step count of a row."""
        self.exp_avg[row], self.exp_avg_sq[row], self.steps[row] = exp_avg, exp_avg_sq, step

    def clear(self, row: int) -> None:
        for state in (self.exp_avg, self.exp_avg_sq, self.steps):
            state[row] = 0.0

    def follow(self, weights: Tensor) -> None:
        """Continue with weights [N, P] that have more rows than before."""
        self._weights = weights
        while len(self.steps) < len(weights):
            self.exp_avg, self.exp_avg_sq, self.steps = map(doubled, (self.exp_avg, self.exp_avg_sq, self.steps))
