"""Log-probabilities of a packed row's scored tokens: the one quantity that losses, scorers and checks of an engine share.

Called by the trainer, with the model bare or inside DDP or FSDP2: only the outermost forward is called, so that its collectives run. Where
the model's rows are spread over ranks, each runs its share, and all get all scores.
"""

import inspect
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.data.packing import PackedRow, Segments
from offbeat.data.sample_supports import Supports
from offbeat.errors import ModelError
from offbeat.model.apart import apart_logits
from offbeat.model.attention import PACKED, AttentionPlan, build_plan, planned
from offbeat.model.context import RowShare, share_of
from offbeat.model.head import Picks, check_head_format, fused_head, never_fuse, pick
from offbeat.model.images import has_images, row_inputs
from offbeat.model.load import rope_limit_of
from offbeat.model.routers import record_of
from offbeat.model.uploads import upload


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
def token_logprobs(
    model: nn.Module, row: PackedRow, *, temperature: float = 1.0, with_entropy: Literal[True], entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]: ...
def token_logprobs(
    model: nn.Module, row: PackedRow, *, temperature: float = 1.0, with_entropy: bool = False, entropy_gradient: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Score a row's target tokens under the model, each among the tokens of its support, if the row has supports.

    Args:
        model: from `load_causal_lm`, bare or wrapped; its row has R tokens, of which M are scored. With attention other than "packed"
            each sequence runs by itself.
        row: at least one token; `dummy_row()` where there is nothing to score.
        temperature: the logits are divided by it, as the engine did when it sampled.
        with_entropy: also return the entropy of the distribution of each token.
        entropy_gradient: whether the entropies have a gradient, which takes one more pass over the logits in the backward pass, but no
            more memory than a few megabytes.

    Returns:
        [M] float32 log-probabilities with gradient, in the order of `row.target`; with `with_entropy` also [M] float32 entropies in nats,
        without gradient unless `entropy_gradient`.

    Raises:
        ModelError: the model does not compute attention as the row needs.
    """
    share = share_of(model, row)
    source, inverse, supports = _positions(share)
    picks = Picks(inverse, share.target.astype(np.int64), temperature, with_entropy, entropy_gradient, supports)
    logprobs, entropy = _picked(model, share, scored_positions(source), picks)
    if not with_entropy:
        return share.gather(logprobs)
    return share.gather(logprobs), share.gather(entropy[upload(inverse, entropy.device)])


def _positions(share: RowShare) -> tuple[np.ndarray, np.ndarray, Supports | None]:
    """Return the positions [U] int64 of the softmaxes of a share's m targets, which of them each target uses [m], and their supports.

    Where samples share a prompt, its last position predicts several tokens: one softmax serves all of them whose support is whole.
    """
    supports = share.row.supports
    if supports is None:
        source, inverse = np.unique(share.source, return_inverse=True)
        return source, inverse, None
    own = supports.at_indices(share.which)
    kinds = np.where(own.are_whole, -1, np.arange(len(own)))
    (source, _), first, inverse = np.unique(np.stack([share.source, kinds]), axis=1, return_index=True, return_inverse=True)
    # A share that predicts nothing runs its head at one position all the same; see `scored_positions`.
    return source, inverse.reshape(-1), own.at_indices(first) if len(first) else None


def dummy_row() -> PackedRow:
    """One token, none scored: lets a rank with nothing to do run the same collectives as its peers. Its gradient is zero."""
    one, none = np.zeros(1, np.int32), np.zeros(0, np.int64)
    segments = Segments(np.zeros(1, np.int64), np.ones(1, np.int64), np.full(1, -1))
    return PackedRow(one, one, segments, source=none, target=none, batch_index=none, owner=np.full(1, -1))


def unscored(row: PackedRow) -> PackedRow:
    """Return the same row with nothing to score, for a pass over a model's layers that leaves out its head."""
    none = np.zeros(0, np.int64)
    return replace(row, source=none, target=none, batch_index=none, supports=None)


def scored_positions(source: np.ndarray) -> np.ndarray:
    """Return the positions [U] int64 at which the head runs; [0], whose result is not used, if nothing is scored.

    Every share goes through the graph, as peers wait for its collectives.
    """
    return source if len(source) else np.zeros(1, np.int64)


def head_outputs(model: nn.Module, share: RowShare, source: np.ndarray) -> Tensor:
    """Run a share of a row; returns the output of the model's head [U, V], with gradient, at `source` [U] int64, ascending, of its tokens.

    Arguments and errors are as of `token_logprobs`.
    """
    bare: Any = getattr(model, "module", model)
    keep = upload(source, next(model.parameters()).device)
    selects = "logits_to_keep" in inspect.signature(bare.forward).parameters
    _check_length(share.row, bare)
    if not packs_rows(bare):
        return apart_logits(model, share.row, source, keep.device, selects=selects)
    outputs = _forward(model, share, keep=keep if selects else None)[0]
    return outputs if selects else outputs[keep]


def _picked(model: nn.Module, share: RowShare, source: np.ndarray, picks: Picks) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [M] and, if wanted, entropies [U] at positions `source` [U] of the share; see `head.pick`."""
    bare: Any = getattr(model, "module", model)
    keep = upload(source, next(model.parameters()).device)
    selects = "logits_to_keep" in inspect.signature(bare.forward).parameters
    _check_length(share.row, bare)
    if not packs_rows(bare):
        check_head_format(bare)
        return pick(apart_logits(model, share.row, source, keep.device, selects=selects), picks)
    with fused_head(bare, picks, None if selects else keep) as head:
        logits = _forward(model, share, keep=keep if selects else None)
    if head is not None and (logprobs := head.logprobs(logits)) is not None:
        return logprobs, head.entropy
    if head is not None:
        never_fuse(bare)
        check_head_format(bare)
        logits = _forward(model, share, keep=keep if selects else None)
    return pick(logits[0] if selects else logits[0][keep], picks)


def _forward(model: nn.Module, share: RowShare, *, keep: Tensor | None) -> Tensor:
    """Return the model's logits of the whole share, or at the positions `keep` [U] int64."""
    bare: Any = getattr(model, "module", model)
    device = next(model.parameters()).device
    row, here = share.row, share.here
    record, seen = record_of(model), None
    if has_images(row.tokens):
        if share.context is not None:
            raise ModelError("train.parallel.cp must be 1 for sequences with images, whose features are not divided over ranks")
        inputs, seen = row_inputs(bare, row)
    else:
        inputs = {
            "input_ids": upload(row.tokens[here].astype(np.int64), device).unsqueeze(0),
            "position_ids": upload(row.positions[here].astype(np.int64), device).unsqueeze(0)}
    plan = build_plan(row, device, context=share.context, seen=seen)
    plan.routes = None if row.routes is None else upload(row.routes[here], device)
    with planned():
        outputs = model(
            **inputs,
            # With a cache transformers forgets that the row holds several sequences.
            use_cache=False,
            attention_plan=plan,
            **({} if keep is None else {"logits_to_keep": keep}),
            **({} if record is None else {"output_router_logits": True}),
        )
    _check_plan_was_used(plan, bare)
    if record is not None:
        record.clear()
        record.add(outputs.router_logits, record.uses(row.segments)[here])
    return outputs.logits


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
