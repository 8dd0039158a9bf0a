"""How a `DatumBatch` becomes the packed rows of a `TokenBatch`, so that both kinds of batches share planning, attention and prompts.

Called by `AdapterEngine.run_datums`. Each datum gets one token more at its end: position i of the datum then predicts token i + 1, which is
"trained on" where position i has targets, and the targets take that token's place once the row is laid out.
"""

from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from offbeat.algorithms.datum_losses import datum_losses
from offbeat.data.batch import TokenBatch, gather_ranges
from offbeat.data.datums import DatumBatch
from offbeat.data.packing import PackedRow
from offbeat.errors import DataError
from offbeat.model.logprobs import token_logprobs
from offbeat.trainer.adapter_types import DatumPass


class DatumResults:
    """Collects what the rows of a batch give."""

    def __init__(self, batch: DatumBatch) -> None:
        self._batch = batch
        self._sequences = batch.target_sequences
        self._logprobs = np.zeros(batch.num_targets, np.float32)
        self._losses = np.zeros(len(batch), np.float64)

    def run(self, model: nn.Module, row: PackedRow) -> Tensor:
        """Score a row of the batch's `layout`; the sum of its losses, with gradient."""
        batch = self._batch
        row = with_targets(row, batch)
        sequences, owner = np.unique(self._sequences[row.batch_index], return_inverse=True)
        logprobs = token_logprobs(model, row)
        losses = datum_losses(logprobs, batch.select(sequences))
        self._logprobs[row.batch_index] = logprobs.detach().cpu().numpy()
        self._losses[sequences] = np.bincount(owner, losses.detach().cpu().numpy(), minlength=len(sequences))
        return losses.sum()

    def take(self) -> DatumPass:
        """Of all rows."""
        return DatumPass(self._logprobs, self._losses.astype(np.float32))


def layout(batch: DatumBatch, *, max_tokens: int) -> TokenBatch:
    """The batch as one that can be planned and packed; see above.

    Sequences that have the same tokens up to where their first trained target is predicted form a group, whose prompt runs once.

    Raises:
        DataError: a datum has more than `max_tokens` tokens.
    """
    longest = int(batch.lengths.argmax()) if len(batch) else 0
    if len(batch) and batch.lengths[longest] > max_tokens:
        raise DataError(
            f"datum {longest} has {batch.lengths[longest]} tokens, which exceeds train.max_tokens_per_microbatch = {max_tokens};"
            " raise it or shorten the datum")
    ends = batch.offsets[1:]
    loss_mask = np.insert(np.diff(batch.target_offsets) > 0, batch.offsets[:-1], False)
    group_ids, prefix_lens = _prompts(batch)
    zeros = np.zeros(len(loss_mask), np.float32)
    return TokenBatch(
        tokens=np.insert(batch.tokens, ends, 0), loss_mask=loss_mask, rollout_logprobs=zeros, advantages=zeros, loss_weights=zeros,
        offsets=batch.offsets + np.arange(len(batch) + 1), group_ids=group_ids, prefix_lens=prefix_lens)


def with_targets(row: PackedRow, batch: DatumBatch) -> PackedRow:
    """The row, of the batch's `layout`, with all targets of each scored position; `batch_index` is then where they stand in the batch."""
    sequence = np.searchsorted(batch.offsets + np.arange(len(batch) + 1), row.batch_index, side="right") - 1
    position = row.batch_index - 1 - sequence
    index = gather_ranges(batch.target_offsets, position)
    source = np.repeat(row.source, np.diff(batch.target_offsets)[position])
    return replace(row, source=source, target=batch.targets[index].astype(np.int64), batch_index=index)


def _prompts(batch: DatumBatch) -> tuple[np.ndarray, np.ndarray]:
    """Group ids and prefix lengths [N]; a sequence that trains nothing shares no prompt."""
    trained = np.flatnonzero((batch.weights != 0) | (batch.advantages != 0))
    position = np.searchsorted(batch.target_offsets, trained, side="right") - 1
    sequences, first = np.unique(batch.target_sequences[trained], return_index=True)
    prefix_lens = np.zeros(len(batch), np.int64)
    prefix_lens[sequences] = position[first] + 1 - batch.offsets[sequences]
    ids: dict[bytes | int, int] = {}
    keys = [batch.tokens[start : start + length].tobytes() if length else i
            for i, (start, length) in enumerate(zip(batch.offsets[:-1], prefix_lens, strict=True))]
    return np.array([ids.setdefault(key, len(ids)) for key in keys], np.int64), prefix_lens
