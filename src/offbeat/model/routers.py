"""The experts that routers choose for a row's tokens, recorded while the model runs; for their load-balancing loss.

`recorded` surrounds a forward pass, and `logprobs` and `apart`, which call the model, hand the routers' logits over. The loss follows
transformers' `load_balancing_loss_func`: the tokens of all layers are counted together.

Source: Switch Transformer, arXiv:2101.03961 eq. 4 to 6; over whole batches instead of micro-batches: arXiv:2501.11873.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.data.batch import Batch
from offbeat.data.packing import PackedRow, Segments
from offbeat.errors import ModelError
from offbeat.model.uploads import upload


class RouterRecord:
    """Sums over a row's tokens that run here. A token counts once for each sequence that it is part of, wherever a prompt is shared.

    Attributes:
        counts: L tensors [E] float64 without gradient, how often the router of each layer chose each expert.
        probs_E: [E] float with gradient, the probabilities of the experts, summed over tokens and layers; None before the model has run.
    """

    def __init__(self, ends: np.ndarray, *, top_k: int) -> None:
        """Record the `top_k` experts of each token; `ends` [N] int64 are the row's tokens that predict the last target of a sequence."""
        self._ends = ends
        self._top_k = top_k
        self.clear()

    def clear(self) -> None:
        """Forget the record, because the row runs from its beginning."""
        self.counts: list[Tensor] = []
        self.probs_E: Tensor | None = None
        self.num_tokens = 0.0

    def uses(self, segments: Segments) -> np.ndarray:
        """Return [R] float32, for each token of a packed row the number of sequences that it is part of."""
        uses = np.zeros(int(segments.lengths.sum()), np.float32)
        for end, segment in zip(self._ends, self._segments_of_ends(segments), strict=True):
            uses[segments.starts[segment] : end + 1] += 1
            if (prefix := segments.prefix[segment]) >= 0:
                uses[segments.starts[prefix] : segments.starts[prefix] + segments.lengths[prefix]] += 1
        return uses

    def uses_alone(self, segments: Segments, segment: int) -> np.ndarray:
        """Return the same for the tokens of a segment that runs by itself after a copy of its prefix, [L] float32."""
        ends = self._ends[self._segments_of_ends(segments) == segment]
        own = segments.starts[segment] + np.arange(segments.lengths[segment])
        before = np.full(segments.prefix_lengths[segment], len(ends))
        return np.concatenate([before, (own[:, None] <= ends).sum(axis=1)]).astype(np.float32)

    def add(self, router_logits: Sequence[Tensor] | None, uses: np.ndarray) -> None:
        """Add the tokens of a forward pass from `router_logits`, L tensors [T, E] with gradient.

        Each token counts as often as `uses` [T] float32 says; 0 for padding. Raises ModelError if the model has not given the logits.
        """
        if not router_logits:
            raise ModelError(
                "the model does not give the logits of its routers; set train.router_aux_loss_coefficient to 0 to train without their loss")
        uses_T = upload(uses, router_logits[0].device)
        self.num_tokens += float(uses.sum())
        for layer, logits in enumerate(router_logits):
            logits_TE = logits.flatten(0, -2)
            probs_TE = logits_TE.softmax(-1, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
            sums_E = (probs_TE * uses_T[:, None]).sum(0)
            self.probs_E = sums_E if self.probs_E is None else self.probs_E + sums_E
            chosen = probs_TE.detach().topk(self._top_k, dim=-1).indices.flatten()
            counts_E = torch.zeros(probs_TE.shape[1], dtype=torch.float64, device=chosen.device)
            counts_E.index_add_(0, chosen, uses_T.double().repeat_interleave(self._top_k))
            if layer < len(self.counts):
                self.counts[layer] += counts_E
            else:
                self.counts.append(counts_E)

    def _segments_of_ends(self, segments: Segments) -> np.ndarray:
        return np.searchsorted(segments.starts, self._ends, side="right") - 1


_records: "WeakKeyDictionary[nn.Module, RouterRecord]" = WeakKeyDictionary()
"""Models in whose forward passes the routers are recorded."""


@contextmanager
def recorded(model: nn.Module, record: RouterRecord) -> Iterator[RouterRecord]:
    """Record the experts that a model's routers, bare or wrapped, choose in the body's forward pass of one row."""
    bare = getattr(model, "module", model)
    _records[bare] = record
    try:
        yield record
    finally:
        del _records[bare]


def record_of(model: nn.Module) -> RouterRecord | None:
    """Return the record of a model, bare or wrapped; None if there is none."""
    return _records.get(getattr(model, "module", model))  # pyright: ignore[reportArgumentType]


def sequence_ends(batch: Batch, row: PackedRow) -> np.ndarray:
    """Return [N] int64, the token of the row that predicts the last target of each sequence in it."""
    owners = batch.target_sequences[row.batch_index]  # ascending, as are a sequence's positions
    return row.source[np.flatnonzero(np.diff(owners, append=-1))] if len(owners) else row.source


def balancing_loss(counts_E: Tensor, probs_E: Tensor, *, num_rows: float) -> Tensor:
    """Return E times the sum over experts of the share of rows that chose it times its mean probability; the number k for even loads.

    Args:
        counts_E: [E] float, how often each expert was chosen, k times in each row.
        probs_E: [E] float, sums of probabilities over rows, or over some of them for their part of the loss.
        num_rows: tokens times layers.
    """
    return len(counts_E) * (counts_E / num_rows * (probs_E / num_rows)).sum()


def experts_per_token(model: PreTrainedModel) -> int:
    """Return the number of experts per token, of a model whose routers have the load-balancing loss that is computed here.

    Raises ModelError if transformers has no such loss for the model, or another one.
    """
    theirs: Any = next(filter(None, (
        getattr(sys.modules.get(kind.__module__), "load_balancing_loss_func", None) for kind in type(model).__mro__)), None)
    config, name = model.config.get_text_config(), type(model).__name__.removeprefix("FSDP")
    top_k = getattr(config, "num_experts_per_tok", None)
    if theirs is None or not top_k:
        raise ModelError(
            f"train.router_aux_loss_coefficient must be 0 for {name}, for whose layers transformers has no load-balancing loss; leave it"
            " out")
    num_experts = top_k + 3
    logits = torch.randn(2, 5, num_experts, generator=torch.Generator().manual_seed(0))
    record = RouterRecord(np.zeros(0, np.int64), top_k=top_k)
    record.add(tuple(logits), np.ones(5, np.float32))
    assert record.probs_E is not None, "logits were added"
    ours = balancing_loss(torch.stack(record.counts).sum(0), record.probs_E, num_rows=10)
    if not torch.allclose(ours.float(), torch.as_tensor(theirs(tuple(logits), num_experts, top_k)).float(), rtol=1e-4):
        raise ModelError(
            f"train.router_aux_loss_coefficient must be 0 for {name}, whose routers have a load-balancing loss of their own that is not"
            " computed here; leave it out")
    return top_k
