"""Picked log-probabilities by torch's softmax, for devices where a pass over memory costs more than anything but products.

Called by `head`, whose `_Picked` computes the same in parts that stay in a CPU's cache. Here a chunk's logits become probabilities in one
kernel, log-normalisers follow from each row's largest logit and its probability, and the gradient is written in the number format of the
products that read it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.model.uploads import upload
from offbeat.model.vocabulary import Vocabulary


class KernelPicked(torch.autograd.Function):
    """Picks entries of the log-softmax of x, or of a linear layer of x, chunk by chunk in both directions."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, picks: Any, chunks_of: Any, vocabulary: Vocabulary,
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probabilities [M] and entropies [U] of the whole vocabulary; `chunks_of` gives the chunks."""
        chunks = chunks_of(x, weight, bias)
        logprobs, normalizer = torch.empty(len(picks.targets), device=x.device), torch.empty(len(x), device=x.device)
        entropy = torch.empty(len(x) if picks.with_entropy else 0, device=x.device)
        kept: list[Tensor | None] = []
        for number, rows in enumerate(chunks.rows):
            raw = chunks.raw(rows)
            which, positions, targets = chunks.picked(number)
            columns, others = vocabulary.own(targets)
            picked = raw[positions - rows.start, columns].float() / picks.temperature
            logprobs[which] = picked if others is None else picked.masked_fill_(others, 0.0)
            largest, places = raw.max(dim=-1, keepdim=True)
            probs = torch.softmax(chunks.scaled(raw), dim=-1)
            # The largest probability is at least 1 / V, so that its logarithm is exact.
            normalizer[rows] = (largest.float() / picks.temperature - probs.gather(1, places).log()).squeeze(1)
            if picks.with_entropy:  # for now the mean logit
                entropy[rows] = normalizer[rows] - torch.special.entr(probs).sum(dim=-1)
            kept.append(probs if chunks.kept(rows) else None)
        entropy, of_own = of_whole_vocabulary(logprobs, normalizer, entropy, picks=picks, vocabulary=vocabulary)
        ctx.save_for_backward(x, weight, bias, entropy, of_own)
        ctx.picks, ctx.chunks_of, ctx.kept, ctx.vocabulary = picks, chunks_of, kept, vocabulary
        if not picks.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x [U, H] or [U, V], the weight [V, H] and the bias [V], from the gradients of log-probabilities [M]
        and entropies [U].
        """
        x, weight, bias, entropy, shares = ctx.saved_tensors
        chunks = ctx.chunks_of(x, weight, bias)
        # The logits are divided by the temperature; so are these instead of the gradient of all logits.
        to_logprobs, to_entropy = (grad if ctx.picks.temperature == 1.0 else grad / ctx.picks.temperature for grad in grads)
        grad_x, grad_weight, grad_bias = empty_gradients(x, weight, bias, needed=ctx.needs_input_grad)
        of_positions, of_places = _sums(ctx.picks, to_logprobs, num_positions=len(x))
        for number, rows in enumerate(chunks.rows):
            probs, ctx.kept[number] = ctx.kept[number], None
            if probs is None:
                probs = torch.softmax(chunks.logits(rows), dim=-1)
            which, positions, targets = chunks.picked(number)
            columns, others = ctx.vocabulary.own(targets)
            places = (positions - rows.start, columns)
            # d logprob[t] / d logit[v] is 1[v = t] - p[v].
            factors = -of_positions[rows].unsqueeze(1)
            if ctx.picks.entropy_gradient:
                # d H / d logit[v] is -p[v] (log p[v] + H).
                probs = probs.mul_(shares[rows].unsqueeze(1))
                logs = probs.log()
                factors = (logs + entropy[rows].unsqueeze(1)).mul_(-to_entropy[rows].unsqueeze(1)).add_(factors)
                factors.masked_fill_(logs == -torch.inf, 0.0)  # 0 * -inf for impossible tokens
            else:
                factors = factors * shares[rows].unsqueeze(1)
            if others is None and chunks.compute != torch.float32:
                gradient = _rounded_gradient(probs, factors, places, of_places[which], chunks.compute)
            else:
                own = to_logprobs[which] if others is None else to_logprobs[which].masked_fill_(others, 0.0)
                gradient = probs.mul_(factors).index_put_(places, own, accumulate=True)
            chunks.backward(rows, gradient, grad_x, grad_weight, grad_bias)
        return ctx.vocabulary.sum(grad_x), like_parameter(grad_weight, weight), like_parameter(grad_bias, bias), None, None, None


def _rounded_gradient(probs: Tensor, factors: Tensor, places: tuple[Tensor, Tensor], sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient [N, V] of logits in `dtype`: probabilities times factors [N, V] or [N, 1], plus `sums` [M] at `places`.

    A place that repeats has the same sum each time. There it is added in float32: a likely token's two terms nearly cancel.
    """
    at = probs[places] * factors.expand_as(probs)[places] + sums
    return torch.mul(probs, factors, out=torch.empty_like(probs, dtype=dtype)).index_put_(places, at.to(dtype))


def _sums(picks: Any, values: Tensor, *, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return the sums of picks' values [M] by position [U], and for each pick the sum of all with its position and its target [M]."""
    keys = np.stack([picks.positions, picks.targets])
    first, inverse = np.unique(keys, axis=1, return_index=True, return_inverse=True)[1:]
    positions, place = upload(np.stack([picks.positions, inverse.ravel()]), values.device)
    by_place = values.new_zeros(len(first)).index_add_(0, place, values)
    return values.new_zeros(num_positions).index_add_(0, positions, values), by_place[place]


def of_whole_vocabulary(
    logprobs: Tensor, normalizer: Tensor, entropy: Tensor, *, picks: Any, vocabulary: Vocabulary,
) -> tuple[Tensor, Tensor]:
    """Join this part of the vocabulary with the others, in place, and normalise; collective.

    Picked logits `logprobs` [M] float32 become log-probabilities, and the normalizer [U] float32 of this part that of the whole. `entropy`
    [U] are mean logits; [0] if they are not wanted. Returns the entropies, and the probabilities of this part of the vocabulary, [U].
    """
    own = normalizer.clone()
    vocabulary.join(normalizer, entropy, logprobs)
    logprobs -= normalizer[upload(picks.positions, normalizer.device)]
    return normalizer - entropy if picks.with_entropy else entropy, (own - normalizer).exp_()


def empty_gradients(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return room for the gradients that are needed, like x, [V, H] and [V]; sums over chunks are float32, whatever the weight is."""
    needs_x, needs_weight, needs_bias, *_ = needed
    return (
        torch.empty_like(x) if needs_x else None,
        None if weight is None or not needs_weight else torch.zeros_like(weight, dtype=torch.float32),
        None if bias is None or not needs_bias else torch.zeros_like(bias, dtype=torch.float32))


def like_parameter(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Return a gradient of any shape, such as [V, H], in its parameter's number format."""
    return None if gradient is None or parameter is None else gradient.to(parameter.dtype)
