"""Reads back the experts of a mixture from the memory that vLLM's kernels multiply with. Used by `vllm_readback`.

vLLM keeps the experts of a layer in two tensors: w13 [E, 2I, H], the gates of each expert above its up projection, and w2 [E, H, I]. Some
kernels take them as they are. Those for CPUs have the numbers of every expert in another order, which is found out by having vLLM pack
numbers that count.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_EXPERT = re.compile(r"(?P<layer>.+)\.(?P<number>\d+)\.(?P<projection>\w+)\.weight")
_BLOCK = 32
"""Rows that kernels for CPUs pack by themselves, whatever the number of rows."""


class Expert:
    """One projection of one expert, in the layer that holds it: `gate` [I, H], `up` [I, H] or `down` [H, I]."""

    def __init__(self, layer: Any, number: int, projection: str) -> None:
        self._layer, self._number, self._projection = layer, number, projection

    @classmethod
    def of_tensor(cls, modules: Mapping[str, nn.Module], name: str) -> "Expert | None":
        """Return the expert to which a file's tensor belongs, such as "model.layers.0.mlp.experts.3.up_proj.weight"; None if to none."""
        match = _EXPERT.fullmatch(name)
        layer: Any = match and (modules.get(f"{match['layer']}.routed_experts") or modules.get(match["layer"]))
        if not match or not hasattr(layer, "w13_weight"):
            return None
        names = {layer.ckpt_gate_proj_name: "gate", layer.ckpt_up_proj_name: "up", layer.ckpt_down_proj_name: "down"}
        projection = names.get(match["projection"])
        return cls(layer, int(match["number"]), projection) if projection else None

    def share(self, tensor: Tensor) -> Tensor | None:
        """Return this worker's share of the tensor; None if another worker has the expert.

        Raises:
            ValueError: experts are spread in a way that is not known here, or the tensor has another form than the expert.
        """
        parallel, config = self._layer.moe_config.moe_parallel_config, self._layer.moe_config
        if parallel.enable_eplb or parallel.dp_size > 1 or not config.is_act_and_mul:
            raise ValueError("experts are on several workers, or have no gates")
        if self._slot() is None:
            return None
        rank, ranks, dim = parallel.tp_rank, parallel.tp_size, 1 if self._projection == "down" else 0
        size = tensor.shape[dim] // ranks
        own = tensor.narrow(dim, rank * size, size)
        if tensor.shape[dim] % ranks or own.shape != self._shape(size):
            raise ValueError(f"a tensor {list(tensor.shape)} is no {self._projection} projection of this layer")
        return own

    def columns(self, columns: Tensor, num_rows: int) -> Tensor:
        """Return columns [C] of the first rows of this worker's share in the order of the file: [num_rows, C]."""
        slot, first, weight = self._slot(), 0, self._layer.w2_weight
        if self._projection != "down":
            weight = self._layer.w13_weight
            first = weight.shape[1] // 2 if self._projection == "up" else 0
        rows = torch.arange(first, first + num_rows)[:, None]
        if (isa := _packing(self._layer)) is None:
            return weight[slot][rows, columns]
        width = weight.shape[2]
        within = _order(width, weight.dtype, isa)[rows % _BLOCK, columns]
        return weight[slot].view(-1)[rows // _BLOCK * (_BLOCK * width) + within]

    def _slot(self) -> int | None:
        """Return the expert's number among those of this worker; None if another one has it."""
        try:
            return self._layer._map_global_expert_id_to_local_expert_id(self._number)
        except ValueError:
            return None

    def _shape(self, size: int) -> tuple[int, int]:
        """Return the shape of a share with `size` numbers along the dimension that is split, which may be padded in memory."""
        weight = self._layer.w2_weight if self._projection == "down" else self._layer.w13_weight
        room = weight.shape[2] if self._projection == "down" else weight.shape[1] // 2
        size = size if size <= room else -1
        return (weight.shape[1], size) if self._projection == "down" else (size, weight.shape[2])


def _packing(layer: Any) -> str | None:
    """Return the instruction set for which experts are packed; None if they are kept as they are."""
    experts = layer.quant_method.moe_kernel.fused_experts
    return None if getattr(experts, "_use_zentorch", False) else getattr(experts, "isa", None)


_orders: dict[tuple[int, torch.dtype, str], Tensor] = {}


def _order(width: int, dtype: torch.dtype, isa: str) -> Tensor:
    """Return where the numbers of a block of rows are in its packed form: [_BLOCK, width] of places in it."""
    from vllm._custom_ops import cpu_prepack_moe_weight  # noqa: PLC0415 (only vLLM for CPUs has it)

    key = width, dtype, isa
    if key not in _orders:
        count, places = torch.arange(_BLOCK * width), torch.zeros(_BLOCK * width, dtype=torch.long)
        bits = 8 * dtype.itemsize
        number = torch.int32 if bits == 32 else torch.int16
        for shift in range(0, 32, bits):  # numbers of 16 bits count in two turns
            part = (count >> shift) & (2**bits - 1)
            block = torch.where(part < 2 ** (bits - 1), part, part - 2**bits).to(number).view(dtype).view(1, _BLOCK, width)
            packed = cpu_prepack_moe_weight(block, isa).view(number).flatten().long() & (2**bits - 1)
            places |= packed << shift
        order = torch.empty_like(count)
        order[places] = count
        _orders[key] = order.view(_BLOCK, width)
    return _orders[key]
