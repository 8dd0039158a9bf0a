"""What an `AdapterEngine` answers. Torch-free: it crosses processes."""

from dataclasses import dataclass, field

import numpy as np

from offbeat.telemetry.tracker import StatsPart


@dataclass(frozen=True, eq=False)
class AdapterPass:
    """A forward and backward pass over one rank's share of a batch.

    Attributes:
        stats: by adapter, what its tokens add to the metrics that `StepStats` describes, and train/logprob, their mean log-probability.
            Those of several ranks become one by `offbeat.telemetry.tracker.combine`.
        logprobs: [T] float32, of the batch's tokens under the weights of the pass; 0 where loss_mask is False.
    """

    stats: dict[str, StatsPart] = field(default_factory=dict)
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))


@dataclass(frozen=True, eq=False)
class DatumPass:
    """A forward, or forward and backward, pass over datums.

    Attributes:
        logprobs: [M] float32, of the batch's targets under the weights of the pass, at temperature 1.
        losses: [N] float32, the sum of each sequence's losses.
    """

    logprobs: np.ndarray
    losses: np.ndarray


@dataclass(frozen=True)
class WrittenAdapter:
    """An adapter in PEFT's format: its folder, `model.fingerprint` of its tensors, and their size in bytes."""

    folder: str
    fingerprint: str
    num_bytes: int
