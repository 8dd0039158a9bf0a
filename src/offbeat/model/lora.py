"""LoRA adapters over one frozen model: a bank of adapters, many of which can take part in one forward and backward pass.

Used by the trainer. All parameters of an adapter are one row of a flat matrix, and its gradient one row of another, so that clipping,
optimizer, reduction over ranks and saving work on rows; each adapted linear layer views its part of them as A [N, in, R] and B [N, R,
out]. An adapter of a lower rank than the bank's, or with fewer layers, is padded with zeros, which stay zero: there the gradient of A is a
product with zeros of B, and vice versa. The model's own names, weights and state_dict stay unchanged; hooks add the adapters' output.

The model may be divided over ranks, of which each holds all of every adapter: see `layer_slices`. The gradient of an adapter is then the
sum of the gradients of all ranks.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.data.packing import PackedRow
from offbeat.errors import ModelError
from offbeat.model.fused_experts import adapt, find_experts
from offbeat.model.layer_slices import WHOLE_LAYER, LayerSlice, slice_of
from offbeat.model.lora_routes import EqualRoute, OneRoute, Route, SpanRoute
from offbeat.model.lora_targets import ALL_LINEAR, EXPERTS, LAYER_KINDS, find_expert_layers, find_targets, layer_kind
from offbeat.model.peft_io import Adapter
from offbeat.model.uploads import upload


@dataclass(frozen=True)
class _Layer:
    """An adapted linear layer, the slice of it computed here, and the offset of its numbers in an adapter's row: A, then B."""

    name: str
    num_in: int
    num_out: int
    start: int
    here: LayerSlice


@dataclass(frozen=True)
class _Slot:
    rank: int
    scaling: float
    layers: frozenset[str]


@dataclass(frozen=True, eq=False)
class _Pass:
    """State of the hooks in the forward passes of one `using`."""

    route: Route
    dropout_seed: tuple[int, ...]  # empty: no dropout


class AdapterBank(nn.Module):
    """N slots for adapters over one model, whose own parameters are frozen from then on.

    Attributes:
        rank: largest rank of an adapter in this bank.
        weights: [N, P] float32, one row per slot; zeros where the slot is free. Backward passes add to `gradients`, never to the model.
        num_passes: number of passes with dropout so far, each of which drops different inputs; saved with the weights.
    """

    num_passes: Tensor

    def __init__(
        self, model: nn.Module, *, rank: int, targets: Sequence[str] = (ALL_LINEAR,), dropout: float = 0.0, seed: tuple[int, ...] = (0,),
        computes: torch.dtype = torch.float32,
    ) -> None:
        """Hook into `model`, on its device.

        Args:
            targets: names of the layers to adapt; see `find_targets` and `find_expert_layers`.
            dropout: share of each adapted layer's inputs that is hidden from the adapters in a pass with dropout.
            seed: seed of the dropout; differs between ranks, except those that compute layers together.
            computes: format in which adapters compute where autocast names none.

        Raises:
            ModelError: a target matches no linear layer, and the message lists the layers; or one that is divided over ranks in a way of
                its own; or as `find_expert_layers`.
        """
        super().__init__()
        self.rank = rank
        self._dropout = dropout
        self._seed = seed
        self._computes = computes
        self._layers: list[_Layer] = []
        self._slots: list[_Slot | None] = [None]
        self._pass: _Pass | None = None
        model.requires_grad_(False)
        size = 0
        for index, (name, layer) in enumerate(find_targets(model, targets).items()):
            self._layers.append(_Layer(name, layer.in_features, layer.out_features, size, slice_of(model, name)))
            size += rank * (layer.in_features + layer.out_features)
            layer.register_forward_hook(partial(self._add_delta, index))
        for layer in find_expert_layers(model, targets):  # behind the others, whose random numbers they leave as they are
            self._layers.append(_Layer(layer.name, layer.num_in, layer.num_out, size, WHOLE_LAYER))
            size += rank * (layer.num_in + layer.num_out)
        self._by_name = {layer.name: layer for layer in self._layers}
        if EXPERTS in targets:
            for name, module in find_experts(model).items():
                adapt(module, _TrainedExperts(self, name))
        self.weights = nn.Parameter(torch.zeros(1, size, device=next(model.parameters()).device))
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))

    @property
    def gradients(self) -> Tensor:
        """[N, P] float32, `weights.grad`; created as zeros on first use."""
        if self.weights.grad is None:
            self.weights.grad = torch.zeros_like(self.weights)
        return self.weights.grad

    def add(self, *, rank: int, scaling: float, seed: int, kinds: Collection[str] = LAYER_KINDS) -> int:
        """Put a fresh adapter into a free slot and return the slot: A is uniform as in PEFT and equal for equal seeds, B is zero.

        Layers of other `kinds`, of `LAYER_KINDS`, stay as they are in the model. Raises ModelError if there are none of these kinds, or if
        the rank is below 1 or exceeds the bank's.
        """
        self._check_rank(rank)
        generator = torch.Generator().manual_seed(seed)
        pairs = {}
        for layer in self._layers:
            if layer_kind(layer.name) not in kinds:
                continue
            bound = 1.0 / math.sqrt(layer.num_in)  # kaiming_uniform with a = sqrt(5)
            a = torch.empty(rank, layer.num_in).uniform_(-bound, bound, generator=generator)
            pairs[layer.name] = (a, torch.zeros(layer.num_out, rank))
        return self.put(Adapter(rank, scaling, pairs))

    @torch.no_grad()
    def put(self, adapter: Adapter) -> int:
        """Put an adapter into a free slot and return the slot. Raises as `check`."""
        row = self.pack(adapter)
        if None not in self._slots:
            self._grow()
        slot = self._slots.index(None)
        self._slots[slot] = _Slot(adapter.rank, adapter.scaling, frozenset(adapter.pairs))
        self.weights[slot] = row
        return slot

    @torch.no_grad()
    def remove_slot(self, slot: int) -> None:
        """Free a slot and zero its weights and gradients."""
        self._slots[slot] = None
        self.weights[slot] = 0.0
        self.gradients[slot] = 0.0

    def adapter(self, slot: int) -> Adapter:
        """Copy the adapter of a slot to the CPU."""
        return self.unpack(self.weights.detach()[slot], slot)

    def unpack(self, row: Tensor, slot: int) -> Adapter:
        """Convert a row [P] float32, of weights or of their moments, to the form of the adapter in `slot`; copied to the CPU."""
        held = self._held(slot)
        flat = row.cpu().unsqueeze(0)
        pairs = {}
        for layer in self._layers:
            if layer.name not in held.layers:
                continue
            a, b = self._parts(flat, layer)
            pairs[layer.name] = (a[0, :, : held.rank].T.clone(memory_format=torch.contiguous_format),
                                 b[0, : held.rank].T.clone(memory_format=torch.contiguous_format))
        return Adapter(held.rank, held.scaling, pairs)

    def check(self, adapter: Adapter) -> None:
        """Raise ModelError if an adapter has no layers, layers that the bank does not have, or a larger rank."""
        self._check_rank(adapter.rank)
        own = {layer.name: (layer.num_in, layer.num_out) for layer in self._layers}
        given = {name: (a.shape[1], len(b)) for name, (a, b) in adapter.pairs.items()}
        if not given:
            raise ModelError(
                f"the adapter would train no layer; model.lora.targets names layers of {', '.join(sorted(set(map(layer_kind, own))))}")
        if others := given.keys() - own.keys():
            raise ModelError(f"the adapter adapts also {min(others)!r}; it must adapt layers that model.lora.targets names, no others")
        for name, (num_in, num_out) in given.items():
            if own[name] != (num_in, num_out):
                raise ModelError(
                    f"the adapter takes {name!r} from {num_in} to {num_out} features, the layer goes from {own[name][0]} to"
                    f" {own[name][1]}; it must be of the same base model")

    def pack(self, adapter: Adapter) -> Tensor:
        """Return the row [P] float32 of an adapter, on the CPU, padded with zeros; the inverse of `unpack`. Raises as `check`."""
        self.check(adapter)
        row = torch.zeros(self.weights.shape[1])
        for layer in self._layers:
            if layer.name not in adapter.pairs:
                continue
            a, b = self._parts(row.unsqueeze(0), layer)
            own_a, own_b = adapter.pairs[layer.name]
            a[0, :, : adapter.rank] = own_a.T
            b[0, : adapter.rank] = own_b.T
        return row

    def route(self, row: PackedRow, slots: np.ndarray, *, here: slice | None = None) -> Route:
        """Plan how the tokens of a row reach their adapters; fastest where tokens of the same adapter are adjacent.

        Args:
            row: a row whose owners are sequences of a batch.
            slots: [N] int64, slot of each sequence of that batch.
            here: the tokens of the row that run here; None for all.
        """
        of_segment = slots[row.owner]
        firsts = np.flatnonzero(np.diff(of_segment, prepend=-1))
        bounds = np.append(row.segments.starts[firsts], len(row))
        if here is not None:
            bounds = bounds.clip(here.start, here.stop)
            firsts, bounds = firsts[(inside := np.diff(bounds) > 0)], np.append(bounds[:-1][inside], here.stop)
        spans = of_segment[firsts].tolist()
        if len(spans) == 1:
            return OneRoute(spans[0], self._held(spans[0]).scaling)
        lengths = np.diff(bounds).tolist()
        device, scalings = self.weights.device, np.array([self._held(slot).scaling for slot in spans], np.float32)
        of_token = upload(scalings.repeat(lengths), device).unsqueeze(1)
        scaling = of_token if np.ptp(scalings) else self._held(spans[0]).scaling
        return (EqualRoute if len(set(lengths)) == 1 else SpanRoute)(spans, lengths, scaling, device=device)

    def route_all(self, slot: int) -> Route:
        """Return the route that sends every token to one adapter."""
        return OneRoute(slot, self._held(slot).scaling)

    @contextmanager
    def using(self, route: Route, *, drops: bool = False) -> Iterator[None]:
        """Surround a forward pass in which the adapters take part, and its backward pass; outside, the model is the base model.

        `drops` applies dropout; the log-probabilities of such a pass differ from the policy's.
        """
        around = self._pass
        self._pass = _Pass(route, (*self._seed, int(self.num_passes)) if drops and self._dropout else ())
        self.num_passes += drops
        try:
            yield
        finally:
            self._pass = around

    def _check_rank(self, rank: int) -> None:
        if not 1 <= rank <= self.rank:
            raise ModelError(f"an adapter's rank must be in 1..{self.rank}, got {rank}; choose another, or raise model.lora.rank")

    def _held(self, slot: int) -> _Slot:
        held = self._slots[slot]
        assert held is not None, f"slot {slot} holds no adapter"
        return held

    def _grow(self) -> None:
        gradients, self.weights.grad = self.weights.grad, None
        self.weights.data = doubled(self.weights.data)
        self.weights.grad = None if gradients is None else doubled(gradients)
        self._slots += [None] * len(self._slots)

    def _parts(self, flat: Tensor, layer: _Layer) -> tuple[Tensor, Tensor]:
        """Split [N, P] numbers into the views A [N, in, R] and B [N, R, out] of a layer."""
        middle = layer.start + layer.num_in * self.rank
        a = flat[:, layer.start : middle].unflatten(1, (layer.num_in, self.rank))
        return a, flat[:, middle : middle + self.rank * layer.num_out].unflatten(1, (self.rank, layer.num_out))

    def _parts_here(self, flat: Tensor, layer: _Layer) -> tuple[Tensor, Tensor]:
        """Return this rank's slices of these views, A [N, inputs here, R] and B [N, R, outputs here]."""
        a, b = self._parts(flat, layer)
        return a[:, layer.here.inputs], b[:, :, layer.here.outputs]

    def _add_delta(self, index: int, _module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if self._pass is None:
            return output
        x, layer = args[0], self._layers[index]
        if self._pass.dropout_seed:
            x = x * self._keep_mask(x, layer, (*self._pass.dropout_seed, index))
        if layer.here.group is not None:
            output = output.clone()  # a tensor group's output is a view that must not be changed in place
        return _Delta.apply(output, x, self.weights, self, layer, self._pass.route)

    def _keep_mask(self, x: Tensor, layer: _Layer, seed: tuple[int, ...]) -> Tensor:
        # Seeded separately, not from the global state, so that a layer that is recomputed in the backward pass draws the same mask.
        state = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
        generator = torch.Generator(x.device).manual_seed(state % 2**63)
        drawn = torch.rand((*x.shape[:-1], layer.num_in), generator=generator, device=x.device)
        kept = drawn[..., layer.here.inputs] >= self._dropout
        return kept.to(x.dtype) / (1.0 - self._dropout)


class _TrainedExperts:
    """A bank's adapters beside the experts of a module; see `ExpertAdapters`."""

    def __init__(self, bank: AdapterBank, module: str) -> None:
        self._bank = bank
        self._module = module

    def take_part(self) -> bool:
        return self._bank._pass is not None

    def add(self, part: str, expert: int, x: Tensor, output: Tensor, rows: Tensor) -> Tensor:
        bank, now = self._bank, self._bank._pass
        assert now is not None, "the adapters take part"
        return _Delta.apply(output, x, bank.weights, bank, bank._by_name[f"{self._module}.{part}.{expert}"], now.route.subset(rows))


class _Delta(torch.autograd.Function):
    """Computes output += scaling * (x A) B. Adds the gradients of A and B to the bank's; through autograd each would be a dense [N, P]."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, _weights: Tensor, bank: AdapterBank, layer: _Layer, route: Route) -> Tensor:
        """Add the adapters' part to output [..., O] in place, from x [..., I].

        `_weights` is an argument so that the result has a gradient even without x's. `output` is the first because a linear layer with a
        bias gives a view, and autograd takes the first argument of a function that changes a view for that view.
        """
        device_type = x.device.type
        ctx.dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else bank._computes
        ctx.bank, ctx.layer, ctx.route = bank, layer, route
        a, b = bank._parts_here(bank.weights.detach(), layer)
        narrow = route.multiply(x.flatten(0, -2).to(ctx.dtype), a).mul_(route.scaling)
        route.add_product(output.view(-1, output.shape[-1]), layer.here.sum_inputs(narrow), b)
        ctx.save_for_backward(x, narrow)
        ctx.mark_dirty(output)  # the backward pass of a linear layer does not need its output
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of output [..., O] and x [..., I]; the gradient of the bank's weights is added to `bank.gradients`."""
        (grad,) = grads
        x, narrow = ctx.saved_tensors
        here: LayerSlice = ctx.layer.here
        a, b = ctx.bank._parts_here(ctx.bank.weights.detach(), ctx.layer)
        grad_a, grad_b = ctx.bank._parts_here(ctx.bank.gradients, ctx.layer)
        g = grad.flatten(0, -2).to(ctx.dtype)
        grad_narrow = ctx.route.multiply(g, b.mT).mul_(ctx.route.scaling)
        if here.counts:
            ctx.route.add_outer(grad_b, narrow, g)
            ctx.route.add_outer(grad_a, x.flatten(0, -2).to(ctx.dtype), grad_narrow)
        grad_x = None
        if ctx.needs_input_grad[1]:
            grad_x = ctx.route.multiply(here.sum_outputs(grad_narrow), a.mT).to(x.dtype).view_as(x)
        return grad, grad_x, None, None, None, None


def doubled(rows: Tensor) -> Tensor:
    """Append as many rows of zeros to [N, P] rows."""
    return torch.cat([rows, torch.zeros_like(rows)])
