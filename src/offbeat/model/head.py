"""The output head with its log-softmax, for callers that need only some entries: logits are held only chunk by chunk.

Called by `logprobs`. At a vocabulary of 49,152 tokens the logits of 4,096 positions take 800 MB, their gradient as much again, and the
softmax between them a third time. Here they are computed chunk by chunk, and computed again in the backward pass where keeping them would
take more than a bound that depends on the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, overload
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from offbeat.data.sample_supports import Supports
from offbeat.errors import ModelError
from offbeat.model.kernel_head import KernelPicked, empty_gradients, like_parameter, of_whole_vocabulary
from offbeat.model.supports import keep_within
from offbeat.model.uploads import upload
from offbeat.model.vocabulary import Vocabulary


@dataclass(frozen=True)
class HeadSizes:
    """Bounds on the logits that are held, by kind of device; logits are float32.

    Attributes:
        chunk_bytes: size of the logits computed at a time.
        chunk_rows: most positions of a chunk.
        kept_bytes: size of the logits kept for the backward pass. Recomputing the rest costs a third of the head's time, a fifteenth of a
            135M model's.
        pass_bytes: size of the logits normalised at a time; 0 normalises a whole chunk by torch's kernel for a softmax.
    """

    chunk_bytes: int
    chunk_rows: int
    kept_bytes: int
    pass_bytes: int

    def rows(self, vocab_size: int) -> int:
        """Return the number of positions in a chunk."""
        return max(1, min(self.chunk_rows, self.chunk_bytes // (4 * vocab_size)))


CPU_SIZES = HeadSizes(chunk_bytes=64 << 20, chunk_rows=1 << 30, kept_bytes=256 << 20, pass_bytes=4 << 20)
"""Enough rows for a fast matrix product, for any vocabulary; each part that is normalised stays in cache with intermediate results."""

ACCELERATOR_SIZES = HeadSizes(chunk_bytes=2 << 30, chunk_rows=8192, kept_bytes=2 << 30, pass_bytes=0)
"""Few chunks, each normalised in one go: launches of kernels and passes over memory cost more than a cache would save."""


def sizes_of(device: torch.device) -> HeadSizes:
    return CPU_SIZES if device.type == "cpu" else ACCELERATOR_SIZES


_unfused: "WeakSet[nn.Module]" = WeakSet()
"""Models that process their logits after the head."""

_in_float32: "WeakSet[nn.Module]" = WeakSet()
"""Models whose head computes in float32, whatever the other layers compute in."""


@dataclass(frozen=True, eq=False)
class Picks:
    """The entries wanted from the log-softmax at U positions: M of them.

    Attributes:
        positions: [M] int64, position of each entry, in 0..U-1.
        targets: [M] int64, token of each entry.
        temperature: divisor of the logits.
        with_entropy: whether the entropy of each position is computed, too.
        entropy_gradient: whether the entropy has a gradient. Its backward pass uses the chunks of the log-probabilities: it keeps one more
            number per position, and takes one more buffer of the size of a CPU's cache.
        supports: of the U positions, the tokens among which each is normalised; None for the whole vocabulary.
    """

    positions: np.ndarray
    targets: np.ndarray
    temperature: float
    with_entropy: bool
    entropy_gradient: bool = False
    supports: Supports | None = None


def pick(logits_UV: Tensor, picks: Picks) -> tuple[Tensor, Tensor]:
    """Return the picked log-probabilities of logits [U, V], [M] float32 with gradient, and entropies.

    These are [U] float32, with gradient if the picks say so; [0] where they were not requested.
    """
    return _picked(logits_UV, None, None, picks, None, Vocabulary(0, logits_UV.shape[1]))


class FusedHead:
    """A linear output head that returns picked log-probabilities instead of logits, for one forward pass of its model.

    The pass sets `entropy`, [U] float32.
    """

    def __init__(self, head: nn.Linear, picks: Picks, keep: Tensor | None, *, in_float32: bool = False) -> None:
        """`keep` [U] int64 selects from the positions that reach the head; None selects all of them."""
        self._in_float32 = in_float32
        self.entropy: Tensor
        self._head = head
        self._picks = picks
        self._keep = keep
        self._answer: Tensor | None = None

    def __call__(self, input: Tensor) -> Tensor:  # the parameter name of nn.Linear
        """Map hidden states [1, positions, H] to log-probabilities [1, M, 1]."""
        rows = input[0] if self._keep is None else input[0][self._keep]
        kind = input.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        compute = torch.float32 if self._in_float32 else torch.get_autocast_dtype(kind) if casts else None
        weight, bias = self._head.weight, self._head.bias
        with torch.autocast(kind, enabled=False) if self._in_float32 else nullcontext():  # which would cast the products back
            logprobs, self.entropy = _picked(rows, local_part(weight), local_part(bias), self._picks, compute, Vocabulary.of(weight))
        answer = self._answer = logprobs[None, :, None].clone()  # not a view, which FSDP2 warns about
        return answer

    def logprobs(self, output: Tensor) -> Tensor | None:
        """Return the [M] log-probabilities in the model's output; None if the model processed the head's output any further."""
        return output[0, :, 0] if output is self._answer else None


@contextmanager
def fused_head(model: nn.Module, picks: Picks, keep: Tensor | None) -> Iterator[FusedHead | None]:
    """Put a fused head into a model for one forward pass; `picks` and `keep` [U] int64 as for `FusedHead`.

    Yields None and changes nothing where the model's head is not a plain linear layer.

    Raises:
        ModelError: the head is to compute in float32, and is not such a layer.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) and model not in _unfused else None
    if not isinstance(head, nn.Linear) or not _is_plain(head):
        check_head_format(model)
        yield None
        return
    fused, kept = FusedHead(head, picks, keep, in_float32=model in _in_float32), vars(head).get("forward")
    head.forward = fused
    try:
        yield fused
    finally:
        del head.forward
        if kept is not None:
            head.forward = kept


@overload
def local_part(parameter: Tensor) -> Tensor: ...


@overload
def local_part(parameter: Tensor | None) -> Tensor | None: ...


def local_part(parameter: Tensor | None) -> Tensor | None:
    """Return the part of a parameter that this rank holds, for example [V / R, H] of a DTensor [V, H]."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _is_plain(head: nn.Linear) -> bool:
    """Whether a layer is nothing but linear; FSDP2 makes a class of its own, whose hooks gather the weight and must run."""
    if isinstance(head, FSDPModule):
        return type(head).__bases__[-1] is nn.Linear
    return type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks


def never_fuse(model: nn.Module) -> None:
    """Remember that the model's logits differ from its head's output."""
    _unfused.add(model)


def compute_in_float32(model: nn.Module) -> None:
    """Make a model's head multiply and add in float32 under mixed precision, too; its weight is copied for each pass."""
    _in_float32.add(model)


def check_head_format(model: nn.Module) -> None:
    """Raise ModelError where the model itself runs a head that is to compute in float32."""
    if model in _in_float32:
        raise ModelError(
            f"algorithm.float32_head must be false for {type(model).__name__} with train.precision = 'bf16_mixed', got true; the model"
            " computes its logits by itself, so set it to false, or train.precision = 'float32'")


def _picked(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, picks: Picks, compute: torch.dtype | None, vocabulary: Vocabulary,
) -> tuple[Tensor, Tensor]:
    """Pick log-probabilities [M] and entropies [U]; arguments as of `_Picked.forward`."""
    if sizes_of(x.device).pass_bytes:
        return _Picked.apply(x, weight, bias, picks, compute, torch.is_grad_enabled(), vocabulary)
    chunks = partial(_Chunks, picks=picks, compute=compute, keeps=torch.is_grad_enabled() and weight is not None, start=vocabulary.start)
    return KernelPicked.apply(x, weight, bias, picks, chunks, vocabulary)


class _Picked(torch.autograd.Function):
    """Picks entries of the log-softmax of x, or of a linear layer of x, chunk by chunk in both directions."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, picks: Picks, compute: torch.dtype | None, grad: bool,
        vocabulary: Vocabulary,
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probabilities [M] and entropies [U] of the whole vocabulary.

        x is [U, H] with a weight [V, H], else [U, V], V the size of the `vocabulary` on this rank; `compute` is the dtype of the products,
        None for x's.
        """
        chunks = _Chunks(x, weight, bias, picks=picks, compute=compute, keeps=grad and weight is not None, start=vocabulary.start)
        logprobs = torch.empty(len(picks.targets), device=x.device)
        normalizer, sums = torch.empty(len(x), device=x.device), torch.empty(len(x), device=x.device)
        entropy = torch.empty(len(x) if picks.with_entropy else 0, device=x.device)
        kept: list[Tensor | None] = []
        for number, rows in enumerate(chunks.rows):
            logits = chunks.logits(rows)
            which, positions, targets = chunks.picked(number)
            columns, others = vocabulary.own(targets)
            picked = logits[positions - rows.start, columns]
            logprobs[which] = picked if others is None else picked.masked_fill_(others, 0.0)
            for place in chunks.passes(rows):
                part = logits[place.start - rows.start : place.stop - rows.start]
                largest = part.amax(dim=-1)
                exps, mean = _exponentials(part, largest, spend=chunks.spends_logits, with_mean=picks.with_entropy)
                sums[place] = exps.sum(dim=-1)
                normalizer[place] = largest + sums[place].log()
                if mean is not None:
                    entropy[place] = largest + mean / sums[place]
            kept.append(logits if chunks.kept(rows) else None)
        entropy, of_own = of_whole_vocabulary(logprobs, normalizer, entropy, picks=picks, vocabulary=vocabulary)
        # Factor of a kept exponential, which is relative to the largest logit of this part of the vocabulary.
        shares = of_own / sums
        ctx.save_for_backward(x, weight, bias, normalizer, entropy, shares)
        ctx.picks, ctx.compute, ctx.kept, ctx.vocabulary = picks, compute, kept, vocabulary
        if not picks.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x [U, H] or [U, V], the weight [V, H] and the bias [V], from the gradients of log-probabilities [M]
        and entropies [U].
        """
        x, weight, bias, normalizer, entropy, shares = ctx.saved_tensors
        chunks = _Chunks(x, weight, bias, picks=ctx.picks, compute=ctx.compute, start=ctx.vocabulary.start)
        # The logits are divided by the temperature; so are these instead of the gradient of all logits.
        to_logprobs, to_entropy = (grad if ctx.picks.temperature == 1.0 else grad / ctx.picks.temperature for grad in grads)
        grad_x, grad_weight, grad_bias = empty_gradients(x, weight, bias, needed=ctx.needs_input_grad)
        for number, rows in enumerate(chunks.rows):
            logits, ctx.kept[number] = ctx.kept[number], None
            has_exps = logits is not None and chunks.spends_logits
            if logits is None:
                logits = chunks.logits(rows).clone() if chunks.lends_logits else chunks.logits(rows)
            which, positions, targets = chunks.picked(number)
            # d logprob[t] / d logit[v] is 1[v = t] - p[v]; `sums` adds up the incoming gradients of a position's picks.
            sums = normalizer.new_zeros(rows.stop - rows.start).index_add_(0, positions - rows.start, to_logprobs[which])
            if has_exps:
                logits.mul_((sums * -shares[rows]).unsqueeze(1))
            else:
                for place in chunks.passes(rows):
                    here = slice(place.start - rows.start, place.stop - rows.start)
                    logs = logits[here].sub_(normalizer[place].unsqueeze(1))
                    factors = -sums[here].unsqueeze(1)
                    if ctx.picks.entropy_gradient:
                        # d H / d logit[v] is -p[v] (log p[v] + H).
                        factors = (logs + entropy[place].unsqueeze(1)).mul_(-to_entropy[place].unsqueeze(1)).add_(factors)
                        factors.masked_fill_(logs == -torch.inf, 0.0)  # 0 * -inf for impossible tokens
                    logs.exp_().mul_(factors)
            columns, others = ctx.vocabulary.own(targets)
            own = to_logprobs[which] if others is None else to_logprobs[which].masked_fill_(others, 0.0)
            logits.index_put_((positions - rows.start, columns), own, accumulate=True)
            chunks.backward(rows, logits, grad_x, grad_weight, grad_bias)
        return ctx.vocabulary.sum(grad_x), like_parameter(grad_weight, weight), like_parameter(grad_bias, bias), None, None, None, None


def _exponentials(part: Tensor, largest: Tensor, *, spend: bool, with_mean: bool) -> tuple[Tensor, Tensor | None]:
    """Return exp(logits - largest) of logits [N, V], and if `with_mean` the sums [N] of these times (logits - largest).

    Args:
        largest: [N], of each row.
        spend: whether the exponentials replace the logits in memory.
    """
    above = largest.unsqueeze(1)
    if not with_mean:
        return (part.sub_(above) if spend else part - above).exp_(), None
    logs = part - above
    exps = torch.exp(logs, out=part) if spend else logs.exp()
    return exps, logs.mul_(exps).nansum(dim=-1)  # 0 * -inf for impossible tokens


class _Chunks:
    """The chunks of the U positions, and the linear layer that gives their logits."""

    def __init__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, picks: Picks, compute: torch.dtype | None, keeps: bool = False,
        start: int,
    ) -> None:
        """
        Args:
            compute: format of the products; None for that of x.
            keeps: whether anything may be kept for the backward pass.
            start: the first token of the vocabulary here.
        """
        self._keeps, self._start = keeps, start
        self._x, self._picks = x, picks
        self.compute = compute or x.dtype
        self._weight = None if weight is None else weight.to(self.compute)
        self._bias = None if bias is None else bias.to(self.compute)
        vocab_size = (x if weight is None else weight).shape[-1 if weight is None else 0]
        self._temperature = torch.full((1,), picks.temperature, device=x.device)
        self._row_bytes, self._sizes = 4 * vocab_size, sizes_of(x.device)
        step = self._sizes.rows(vocab_size)
        self.rows = [slice(start, min(start + step, len(x))) for start in range(0, len(x), step)]
        order = np.argsort(picks.positions, kind="stable")
        bounds = np.searchsorted(picks.positions[order], [*(rows.start for rows in self.rows), len(x)])
        self._bounds = bounds.tolist()
        self._sorted = upload(np.stack([order, picks.positions[order], picks.targets[order]]), x.device)

    def logits(self, rows: slice) -> Tensor:
        """Return a chunk's logits [N, V] float32, divided by the temperature; new memory, unless it `lends_logits`."""
        return self.scaled(self.raw(rows))

    def raw(self, rows: slice) -> Tensor:
        """Return a chunk's logits [N, V] as the layer gives them, such as in bfloat16, within its positions' supports."""
        x, supports = self._x[rows], self._picks.supports
        logits = x if self._weight is None else linear(x.to(self.compute), self._weight, self._bias)
        if supports is None:
            return logits
        own = supports.at_indices(np.arange(rows.start, rows.stop))
        return keep_within(logits.clone() if self._weight is None else logits, own, start=self._start)

    def scaled(self, logits: Tensor) -> Tensor:
        """Return logits [N, V] of `raw` in float32, divided by the temperature."""
        if self._picks.temperature == 1.0:
            return logits.float()
        if logits.dtype.itemsize < 4:
            return logits / self._temperature  # a tensor, which makes the quotient float32 in the same pass
        logits = logits.float()
        return logits / self._picks.temperature if self._weight is None else logits.div_(self._picks.temperature)

    @property
    def lends_logits(self) -> bool:
        """Whether the logits are x itself, which must not change."""
        is_plain = self._picks.temperature == 1.0 and self._picks.supports is None
        return self._weight is None and self._x.dtype == torch.float32 and is_plain

    @property
    def spends_logits(self) -> bool:
        """Whether the forward pass turns logits into their exponentials, so that the backward pass only multiplies.

        The gradient of entropies needs their logarithms, and is exact from the logits alone.
        """
        return not self.lends_logits and not self._picks.entropy_gradient

    def passes(self, rows: slice) -> Iterator[slice]:
        """Yield the parts of a chunk that are normalised at a time."""
        step = max(1, self._sizes.pass_bytes // self._row_bytes)
        return (slice(start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step))

    def kept(self, rows: slice) -> bool:
        """Whether the logits of all chunks up to this one may be kept for the backward pass."""
        return self._keeps and rows.stop * self._row_bytes <= self._sizes.kept_bytes

    def picked(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a chunk's picks: their indices among all picks, their positions and their targets, each [M] int64 on the device."""
        which, positions, targets = self._sorted[:, self._bounds[number] : self._bounds[number + 1]]
        return which, positions, targets

    def backward(
        self, rows: slice, grad_logits: Tensor, grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None
    ) -> None:
        """Propagate the gradient [N, V] of a chunk's logits before the temperature to the layer and its input."""
        grad = grad_logits.to(self.compute)
        if grad_x is not None:
            grad_x[rows] = grad if self._weight is None else grad @ self._weight
        if grad_weight is not None:
            x = self._x[rows].to(self.compute)
            if grad.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad.t(), x)
            else:
                grad_weight += grad.t() @ x
        if grad_bias is not None:
            grad_bias += grad.sum(0)
