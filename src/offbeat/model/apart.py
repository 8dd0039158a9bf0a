"""Rows of a model that cannot pack them: each sequence runs by itself, together with others of similar length in padded batches.

Called by `logprobs` where a model's attention is not "packed". Padding follows a sequence, where neither attention nor a recurrent layer
looks. A shared prompt is run again for each sequence that begins with it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.data.packing import PackedRow, Segments
from offbeat.model.attention import bucket_bounds
from offbeat.model.routers import record_of
from offbeat.model.uploads import upload


def apart_logits(model: Any, row: PackedRow, source: np.ndarray, device: torch.device, *, selects: bool) -> Tensor:
    """Compute logits at some positions of a row, [U, V] in the model's dtype, with one forward pass per bucket of similar lengths.

    Args:
        model: the callable that runs a forward pass.
        source: [U] int64, positions in the row, ascending.
        selects: whether the model accepts `logits_to_keep`.
    """
    segments = row.segments
    of_source = np.searchsorted(segments.starts, source, side="right") - 1
    place = source - segments.starts[of_source] + segments.prefix_lengths[of_source]
    used = np.unique(of_source)
    lengths = (segments.lengths + segments.prefix_lengths)[used]
    order = np.argsort(lengths, kind="stable")
    parts, positions, record = [], [], record_of(model)
    if record is not None:
        record.clear()
    for low, high in bucket_bounds(lengths[order], np.zeros_like(lengths)):
        batch = used[order[low:high]]
        index_NL = _padded([_tokens_of(segments, segment) for segment in batch])
        wanted = [np.flatnonzero(of_source == segment) for segment in batch]
        keep_NK = upload(_padded([place[which] for which in wanted]), device)
        outputs = model(
            input_ids=upload(row.tokens[index_NL].astype(np.int64), device), use_cache=False,
            **({"logits_to_keep": keep_NK} if selects else {}), **({} if record is None else {"output_router_logits": True}))
        logits = outputs.logits
        if record is not None:
            uses = [record.uses_alone(segments, segment) for segment in batch]
            record.add(outputs.router_logits, np.concatenate([np.pad(each, (0, index_NL.shape[1] - len(each))) for each in uses]))
        if not selects:
            logits = logits[torch.arange(len(batch), device=device)[:, None], keep_NK]
        picked = [row * keep_NK.shape[1] + np.arange(len(which)) for row, which in enumerate(wanted)]
        parts.append(logits.flatten(0, 1)[upload(np.concatenate(picked), device)])
        positions.append(np.concatenate(wanted))
    # The buckets' order of positions is undone, so that the result is in the order of `source`.
    return torch.cat(parts)[upload(np.argsort(np.concatenate(positions)), device)]


def _tokens_of(segments: Segments, segment: int) -> np.ndarray:
    """Return the row indices of a segment's prefix and of its tokens, [L] int64, such as [0, 1, 5, 6] for 2 tokens after a prefix of 2."""
    parts = [segment] if segments.prefix[segment] < 0 else [segments.prefix[segment], segment]
    return np.concatenate([segments.starts[part] + np.arange(segments.lengths[part]) for part in parts])


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """Stack rows as [N, longest]; shorter rows repeat their last element."""
    longest = max(map(len, rows))
    return np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in rows])
