"""What a `Trainer` is asked and what it answers, one dataclass for each call; they cross processes. Torch-free for the asking end."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from offbeat.algorithms.adam import AdamParams
from offbeat.data.batch import Batch

Dtype = Literal["float32", "bfloat16"]
"""Number format in which weights are published or exported."""


@dataclass(frozen=True, eq=False)
class TrainStep:
    """One rank's share of one training step.

    Attributes:
        batch: the rank's sequences. Its loss weights hold denominators over the shares of all ranks.
        minibatches: per optimizer step, its micro-batches: arrays [n] int64 of indices into `batch`. Counts are equal on all ranks.
        params: of each optimizer step.
    """

    batch: Batch
    minibatches: tuple[tuple[np.ndarray, ...], ...]
    params: AdamParams


@dataclass(frozen=True)
class Trained:
    """A finished training step.

    Attributes:
        metrics: over all ranks; see `offbeat.trainer.stats.merge`.
        start_s, end_s: wall-clock seconds of its begin and end on this rank.
        busy_s: seconds that this rank computed, without waiting for its peers.
    """

    metrics: dict[str, float]
    start_s: float
    end_s: float
    busy_s: float


@dataclass(frozen=True, eq=False)
class Scores:
    """A forward, or forward and backward, pass over a batch.

    Attributes:
        logprobs: [M] float32, of the batch's targets under the weights of the pass.
        losses: [N] float32, the sum of the weighted losses of each sequence's targets.
    """

    logprobs: np.ndarray
    losses: np.ndarray


@dataclass(frozen=True)
class OptimStep:
    """One optimizer step with the gradients gathered, by name of what is updated; "" is all that a run trains."""

    params: dict[str, AdamParams]


@dataclass(frozen=True)
class Stepped:
    """By name, the norm of the gradient before clipping, not finite where the update was left out, and the updates done so far."""

    grad_norms: dict[str, float]
    steps: dict[str, int]


@dataclass(frozen=True)
class Names:
    """Some of the adapters that a trainer has."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class NewAdapter:
    """A fresh adapter, or one that goes on from the PEFT folder `folder`.

    Attributes:
        alpha: over the rank, what its output is scaled by.
        seed: equal seeds give equal weights.
        modules: kinds of layers that a fresh one trains, of `offbeat.model.lora.LAYER_KINDS`; it has no weights for others.
    """

    name: str
    rank: int
    alpha: float
    seed: int
    modules: tuple[str, ...]
    folder: str = ""


@dataclass(frozen=True)
class Folder:
    """A folder to save to or load from.

    Attributes:
        name: of the adapter that is saved or loaded; "" is all that a run trains.
        optimizer: whether an adapter is loaded with its moments and step count, too, or gets fresh ones.
    """

    path: str
    name: str = ""
    optimizer: bool = True

    @property
    def folder(self) -> Path:
        return Path(self.path)


@dataclass(frozen=True)
class Loaded:
    """The step at which a loaded checkpoint stands: training steps of a run, optimizer steps of an adapter."""

    step: int


@dataclass(frozen=True)
class BroadcastRequest:
    """Offer a version to so many engines.

    Attributes:
        host: of rank 0's machine, as engines reach it.
        timeout_s: for one engine to get the version.
    """

    host: str
    num_receivers: int
    timeout_s: float


@dataclass(frozen=True)
class WriteRequest:
    """Write the weights into a new folder, or offer them by broadcast, and score the canary under them.

    Attributes:
        folder: will hold the whole model in Hugging Face's format, or an adapter in PEFT's.
        dtype: of a whole model; an adapter is float32.
        name: of the adapter; "" is all that a run trains.
    """

    folder: str
    dtype: Dtype
    canary: tuple[int, ...]
    name: str = ""
    broadcast: BroadcastRequest | None = None


@dataclass(frozen=True)
class Written:
    """What rank 0 wrote, or offers at the address `broadcast`; `fingerprint` is empty on other ranks."""

    fingerprint: str
    canary_logprobs: tuple[float, ...]
    broadcast: str = ""
    num_bytes: int = 0


@dataclass(frozen=True)
class ExportRequest:
    """Write the model as a Hugging Face folder, with the tokenizer of another."""

    path: str
    tokenizer: str
    dtype: Dtype


@dataclass(frozen=True)
class Canary:
    """Tokens to be scored under the base model alone."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class CanaryScores:
    """Log-probability of each of a canary's tokens but the first."""

    logprobs: tuple[float, ...]
