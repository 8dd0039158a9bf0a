"""Log-probabilities of a packed row's scored tokens: the one quantity that losses, scorers and checks of an engine share.

Called by the trainer, with the model bare or inside DDP or FSDP2: only the outermost forward is called, so that its collectives run.
"""

import inspect
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.data.packing import PackedRow, Segments
from offbeat.errors import ModelError
from offbeat.model.apart import apart_logits
from offbeat.model.attention import PACKED, AttentionPlan, build_plan
from offbeat.model.load import rope_limit_of

_CHUNK = 1 << 20
"""Logits that are normalised at a time: they stay in a CPU's cache, and what is made of them is small."""


class UnpackedError(ModelError):
    """A model has layers that did not use packed attention, though it was asked to."""

    def __init__(self, message: str, *, num_calls: int, num_layers: int) -> None:
        super().__init__(message)
        self.num_calls = num_calls
        self.num_layers = num_layers


def packs_rows(model: nn.Module) -> bool:
    """Whether all sequences of a row run in one forward pass; otherwise each runs by itself."""
    bare: Any = getattr(model, "module", model)
    return bare.config._attn_implementation == PACKED


@overload
def token_logprobs(model: nn.Module, row: PackedRow, *, temperature: float = 1.0, with_entropy: Literal[False] = False) -> Tensor: ...
@overload
def token_logprobs(model: nn.Module, row: PackedRow, *, temperature: float = 1.0, with_entropy: Literal[True]) -> tuple[Tensor, Tensor]: ...
def token_logprobs(
    model: nn.Module, row: PackedRow, *, temperature: float = 1.0, with_entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Score a row's target tokens under the model.

    Args:
        model: from `load_causal_lm`, bare or wrapped; its row has R tokens, of which M are scored. With attention other than "packed"
            each sequence runs by itself.
        row: at least one token; `dummy_row()` where there is nothing to score.
        temperature: the logits are divided by it, as the engine did when it sampled.
        with_entropy: also return the entropy of each token's whole distribution.

    Returns:
        [M] float32 log-probabilities with gradient, in the order of `row.target`; with `with_entropy` also [M] float32 entropies in nats,
        without gradient.

    Raises:
        ModelError: the model does not compute attention as the row needs.
    """
    device = next(model.parameters()).device
    source, inverse = np.unique(row.source, return_inverse=True)
    logits = _logits(model, row, source if len(source) else np.zeros(1, np.int64), device)
    if len(source) < len(logits):
        logits = logits[: len(source)]  # the dummy position: through the graph, yet in no result
    scaled = logits.float() / temperature if temperature != 1.0 else logits.float()
    # Where samples share a prompt, its last position predicts several tokens: one softmax serves them all.
    index = torch.from_numpy(inverse).to(device)
    logprobs, entropy = _Picked.apply(scaled, index, torch.from_numpy(row.target).to(device), with_entropy)
    return (logprobs, entropy[index]) if with_entropy else logprobs


def dummy_row() -> PackedRow:
    """One token, none scored: lets a rank with nothing to do run the same collectives as its peers. Its gradient is zero."""
    one, none = np.zeros(1, np.int32), np.zeros(0, np.int64)
    segments = Segments(np.zeros(1, np.int64), np.ones(1, np.int64), np.full(1, -1))
    return PackedRow(one, one, segments, source=none, target=none, batch_index=none, owner=np.full(1, -1))


class _Picked(torch.autograd.Function):
    """Some entries of a log-softmax over the vocabulary, which as a whole is never made: chunk by chunk, in each direction."""

    @staticmethod
    def forward(ctx: Any, logits_UV: Tensor, index: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """[M] log-probabilities of the targets [M] at the positions `index` [M], and [U] entropies, or none."""
        normalizers, entropies = [], []
        for part in logits_UV.split(_chunk_rows(logits_UV)):
            largest = part.amax(dim=-1, keepdim=True)
            exps = (part - largest).exp_()
            sums = exps.sum(dim=-1)
            normalizers.append(largest[:, 0] + sums.log())
            if with_entropy:
                means = exps.mul_(part).nan_to_num_(nan=0.0).sum(dim=-1) / sums  # 0 * -inf of a token that cannot come
                entropies.append(normalizers[-1] - means)
        normalizer = torch.cat(normalizers)
        ctx.save_for_backward(logits_UV, index, targets, normalizer)
        entropy = torch.cat(entropies) if with_entropy else normalizer.new_empty(0)
        ctx.mark_non_differentiable(entropy)
        return logits_UV[index, targets] - normalizer[index], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of the logits."""
        logits_UV, index, targets, normalizer = ctx.saved_tensors
        sums = torch.zeros_like(normalizer).index_add_(0, index, grads[0])
        result, rows = torch.empty_like(logits_UV), _chunk_rows(logits_UV)
        for out, part, low, total in zip(*(t.split(rows) for t in (result, logits_UV, normalizer, sums)), strict=True):
            torch.sub(part, low.unsqueeze(1), out=out).exp_().mul_(-total.unsqueeze(1))
        result.index_put_((index, targets), grads[0], accumulate=True)
        return result, None, None, None


def _chunk_rows(logits_UV: Tensor) -> int:
    return max(1, _CHUNK // logits_UV.shape[1])


def _logits(model: nn.Module, row: PackedRow, source: np.ndarray, device: torch.device) -> Tensor:
    """[U, V] logits at the U given row positions."""
    bare: Any = getattr(model, "module", model)
    keep = torch.from_numpy(source).to(device)
    selects = "logits_to_keep" in inspect.signature(bare.forward).parameters
    _check_length(row, bare)
    if not packs_rows(bare):
        return apart_logits(model, row, source, device, selects=selects)
    plan = build_plan(row, device)
    logits = model(
        input_ids=torch.from_numpy(row.tokens.astype(np.int64)).to(device).unsqueeze(0),
        position_ids=torch.from_numpy(row.positions.astype(np.int64)).to(device).unsqueeze(0),
        # With a cache transformers forgets that the row holds several sequences.
        use_cache=False,
        attention_plan=plan,
        **({"logits_to_keep": keep} if selects else {}),
    ).logits[0]
    _check_plan_was_used(plan, bare)
    return logits if selects else logits[keep]


def _check_length(row: PackedRow, model: PreTrainedModel) -> None:
    limit = rope_limit_of(model.config)
    if limit is not None and (longest := int(row.positions.max(initial=0)) + 1) > limit:
        raise ModelError(
            f"{type(model).__name__} changes its rotary frequencies where a sequence passes {limit} tokens, and one of {longest} came;"
            f" keep prompt and answer within {limit}"
        )


def _check_plan_was_used(plan: AttentionPlan, model: PreTrainedModel) -> None:
    num_layers = model.config.get_text_config().num_hidden_layers
    if plan.num_calls < num_layers:
        raise UnpackedError(
            f"{type(model).__name__} used packed attention in {plan.num_calls} of {num_layers} layers, so sequences leak into each other; "
            "load it with load_causal_lm(attention=None), so that each runs by itself",
            num_calls=plan.num_calls,
            num_layers=num_layers,
        )
