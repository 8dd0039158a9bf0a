"""AdamW whose moments lie in host memory, for devices that have no room for them (`train.offload_optimizer`).

A step brings moments to the device a part at a time, updates there, and takes them back, so weights are the same to the bit as without:
the same kernel computes them. It costs a transfer of 16 bytes for each parameter, 8 in each direction, and room on the device for the
moments of one part.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from offbeat.sync.platform import current_platform

PART_SIZE = 2**26
"""Number of parameters whose moments are on the device at a time: 512 MiB."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class _Piece:
    """Some rows of a parameter on this rank, with its step count; moments are on the host."""

    weights: Tensor
    gradient: Tensor
    moments: tuple[Tensor, Tensor]
    step: Tensor


class OffloadedAdamW(torch.optim.AdamW):
    """A fused AdamW for parameters on a device, perhaps in shards. It and torch's load each other's state: same names, shapes, shards."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, part_size: int = PART_SIZE) -> None:
        """`groups` are torch's, of parameters."""
        super().__init__(groups, fused=True)
        self._part_size = part_size

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None, "a step has its gradients already"
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            pieces = (piece for parameter in parameters for piece in self._pieces(parameter))
            for part in _parts(pieces, self._part_size):
                _update(part, group)
            if steps := [self.state[parameter]["step"] for parameter in parameters]:
                torch._foreach_add_(steps, 1)
        current_platform.synchronize()  # the moments are on their way back, and the caller may read them now

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class or of torch's; moments stay on the host, where torch would move them away."""
        for own, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(own["params"], given["params"], strict=True):
                state = self._state_of(parameter)
                for name, value in state_dict["state"].get(number, {}).items():
                    _local(state[name]).copy_(_local(value))
            own.update({name: value for name, value in given.items() if name != "params"})

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=_local(parameter).device)
            state.update({name: _zeros_on_host(parameter) for name in _MOMENTS})
        return state

    def _pieces(self, parameter: Tensor) -> Iterator[_Piece]:
        """Cut a parameter [N, ...] along N into pieces of at most a part, or single rows where these are longer."""
        state, own, gradient = self._state_of(parameter), _local(parameter), _local(parameter.grad)
        first, second = (_local(state[name]) for name in _MOMENTS)
        if not own.ndim:
            yield _Piece(own, gradient, (first, second), state["step"])
            return
        # Rows are whole so that a CPU's vectors lie as they would without: its kernel rounds the remainder beside them otherwise.
        num_rows = max(1, self._part_size * len(own) // max(own.numel(), 1))
        for low in range(0, len(own), num_rows):
            rows = slice(low, low + num_rows)
            yield _Piece(own[rows], gradient[rows], (first[rows], second[rows]), state["step"])


def _parts(pieces: Iterator[_Piece], part_size: int) -> Iterator[list[_Piece]]:
    """Put pieces together, in their order, to parts of at most `part_size` parameters, or of a single piece."""
    part, size = [], 0
    for piece in pieces:
        if part and size + piece.weights.numel() > part_size:
            yield part
            part, size = [], 0
        part.append(piece)
        size += piece.weights.numel()
    if part:
        yield part


def _update(part: list[_Piece], group: dict[str, Any]) -> None:
    first, second = ([_to_device(piece.moments[i], piece.weights) for piece in part] for i in range(2))
    beta1, beta2 = group["betas"]
    adamw(
        [piece.weights for piece in part], [piece.gradient for piece in part], first, second, [],
        [piece.step.clone() for piece in part], fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
        weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)
    for i, moved in enumerate((first, second)):
        for piece, tensor in zip(part, moved, strict=True):
            piece.moments[i].copy_(tensor, non_blocking=True)


def _to_device(host: Tensor, beside: Tensor) -> Tensor:
    return host.to(beside.device, non_blocking=True)


def _zeros_on_host(parameter: Tensor) -> Tensor:
    """Return zeros in the host's memory that the device reads by itself, of the shape of a parameter or its shard, such as [V / R, H]."""
    own = _local(parameter)
    zeros = torch.zeros(own.shape, dtype=own.dtype, device="cpu", pin_memory=not current_platform.is_cpu)
    return DTensor(zeros, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else zeros  # pyright: ignore


def _local(tensor: Any) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
