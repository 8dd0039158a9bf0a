"""The likeliest tokens at the positions that predict a packed row's targets, for distillation. Without gradients."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.data.packing import PackedRow
from offbeat.model.context import share_of
from offbeat.model.head import sizes_of
from offbeat.model.logprobs import head_outputs, scored_positions
from offbeat.model.uploads import upload


@dataclass(frozen=True, eq=False)
class TopScores:
    """A model's scores of M targets.

    Attributes:
        logprobs: [M] float32, of the targets.
        top_tokens, top_logprobs: [M, K] int64 and float32, the likeliest tokens in each target's place, in falling order of probability. A
            vocabulary of fewer than K tokens has token 0 of log-probability minus infinity for the rest.
    """

    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


@torch.no_grad()
def top_logprobs(model: nn.Module, row: PackedRow, *, top_k: int, temperature: float = 1.0) -> TopScores:
    """Score a row's targets, and find the `top_k` likeliest tokens in their places; arguments as of `token_logprobs`.

    The logits of all predicting positions are held at once, unlike those of `token_logprobs`.
    """
    share = share_of(model, row)
    source, inverse = np.unique(share.source, return_inverse=True)
    logits = head_outputs(model, share, scored_positions(source))
    where, targets = (upload(array.astype(np.int64), logits.device) for array in (inverse, share.target))
    width = min(top_k, logits.shape[1])
    normalizers = logits.new_zeros(len(logits), dtype=torch.float32)
    top_tokens = torch.zeros(len(logits), top_k, dtype=torch.int64, device=logits.device)
    top = torch.full((len(logits), top_k), -torch.inf, device=logits.device)
    for rows in torch.arange(len(logits)).split(sizes_of(logits.device).rows(logits.shape[1])):
        here = slice(int(rows[0]), int(rows[-1]) + 1)
        chunk = logits[here].float() / temperature
        normalizers[here] = chunk.logsumexp(dim=-1)
        found = chunk.topk(width, dim=-1)
        top_tokens[here, :width], top[here, :width] = found.indices, found.values - normalizers[here, None]
    own = logits[where, targets].float() / temperature - normalizers[where]
    return TopScores(share.gather(own), share.gather(top_tokens[where]), share.gather(top[where]))
