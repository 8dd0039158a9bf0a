"""Logits within the supports that tokens were drawn from. Called by `head`, for each chunk of logits, before it normalises them."""

import numpy as np
import torch
from torch import Tensor

from offbeat.data.sample_supports import BITS, KEPT, LEFT_OUT, Supports
from offbeat.model.uploads import upload

OUTSIDE = -1e20
"""Logit of a token outside of the support. Its probability is exactly 0 beside any other logit, but unlike minus infinity it leaves finite
numbers where a rank's whole part of the vocabulary is outside."""


def keep_within(logits_NV: Tensor, supports: Supports, *, start: int) -> Tensor:
    """Set the logits [N, V] outside of N supports to `OUTSIDE`, in place; they are of tokens `start` to `start` + V - 1."""
    width = logits_NV.shape[1]
    rows, columns = np.repeat(np.arange(len(supports)), supports.sizes), supports.words.astype(np.int64) - start
    forms, here = supports.forms[rows], (columns >= 0) & (columns < width)
    if (kept := np.flatnonzero(supports.forms == KEPT)).size:
        places = _places(rows, columns, here & (forms == KEPT), logits_NV.device)
        values = logits_NV[places]
        logits_NV.index_fill_(0, upload(kept, logits_NV.device), OUTSIDE)
        logits_NV[places] = values
    if (left_out := here & (forms == LEFT_OUT)).any():
        logits_NV[_places(rows, columns, left_out, logits_NV.device)] = OUTSIDE
    if (bits := np.flatnonzero(supports.forms == BITS)).size:
        at = upload(bits, logits_NV.device)
        octets = upload(supports.words[forms == BITS].reshape(len(bits), -1).view(np.uint8), logits_NV.device)
        eight = torch.arange(8, dtype=torch.uint8, device=octets.device)
        inside = (octets[:, :, None] >> eight).bitwise_and_(1).flatten(1)[:, start : start + width]
        logits_NV[at] = logits_NV[at].masked_fill_(inside == 0, OUTSIDE)
    return logits_NV


def _places(rows: np.ndarray, columns: np.ndarray, which: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows and columns [K] int64 of the entries of `which` [N] bool, on the device."""
    found, places = upload(np.stack([rows[which], columns[which]]), device)
    return found, places
