"""Requests to a `Trainer` and its answers, which cross processes. Torch-free, so that the caller can import it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from offbeat.algorithms.adam import AdamParams
from offbeat.data.batch import Batch
from offbeat.sync.peers import Card

Dtype = Literal["float32", "bfloat16"]
"""Number format in which weights are published or exported."""

Policy = Literal["policy", "reference"]
"""Weights under which a batch is scored: the weights in training, or the reference policy's."""

Trainee = Literal["policy", "adapters", "rewards"]
"""Models that ranks train: the configuration's, adapters that come and go on the model, or a reward model."""


@dataclass(frozen=True, eq=False)
class TrainStep:
    """One rank's share of a training step.

    Attributes:
        batch: the rank's sequences. Its loss weights hold denominators over the shares of all ranks.
        minibatches: the micro-batches of each optimizer step: arrays [n] int64 of indices into `batch`, such as (([0, 2], [1]),) for one
            step of two micro-batches. Their numbers are equal on all ranks.
    """

    batch: Batch
    minibatches: tuple[tuple[np.ndarray, ...], ...]
    params: AdamParams


@dataclass(frozen=True)
class Trained:
    """A finished training step.

    Attributes:
        metrics: over all ranks; see `offbeat.trainer.stats.merge`.
        start_s, end_s: time of its start and end on this rank, in seconds since the epoch.
        busy_s: seconds that this rank computed, excluding waits for its peers.
        tokens: run through the model, prompts included, in passes with gradients; a rank that shares rows with others counts its part.
        flops: floating-point operations of the model for all passes of the step, recomputation not counted again, likewise.
        peak_flop_per_s: most operations per second of the rank's device; 0 if unknown.
        memory_bytes: most memory that the rank has taken so far: of its device, or resident on a CPU.
    """

    metrics: dict[str, float]
    start_s: float
    end_s: float
    busy_s: float
    tokens: float = 0.0
    flops: float = 0.0
    peak_flop_per_s: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, eq=False)
class ScoreShare:
    """One rank's share of a batch that is scored without gradients.

    Attributes:
        sequences: [n] int64, their indices in the whole batch.
        microbatches: arrays [n] int64 of indices into `batch`, equally many on all ranks; each target is in one of them.
    """

    batch: Batch
    sequences: np.ndarray
    microbatches: tuple[np.ndarray, ...]
    of: Policy
    with_entropy: bool


@dataclass(frozen=True, eq=False)
class TargetScores:
    """A model's scores of the M targets of a batch, by name, [M] float32 each.

    Of a policy: `logprobs`, log-probabilities of the targets at the temperature that the batch's losses need, and if they were asked for
    `entropy`, in nats, of the whole distributions. Of a value model: `values`.
    """

    columns: dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class ScoredShare:
    """A scored share: the `sequences` of the request, and the scores of their targets; `start_s` and `end_s` are as in `Trained`."""

    sequences: np.ndarray
    scores: TargetScores
    start_s: float
    end_s: float

    def empty(self) -> "ScoredShare":
        """Return the same for a share without sequences."""
        nothing = TargetScores({name: values[:0] for name, values in self.scores.columns.items()})
        return replace(self, sequences=self.sequences[:0], scores=nothing)


@dataclass(frozen=True, eq=False)
class Scores:
    """Result of a pass over a batch.

    Attributes:
        logprobs: [M] float32, log-probabilities of the targets under the weights of the pass.
        losses: [N] float32, sum of the weighted losses of each sequence's targets.
    """

    logprobs: np.ndarray
    losses: np.ndarray


@dataclass(frozen=True)
class OptimStep:
    """One optimizer step with the accumulated gradients, with settings by name of the weights; "" is everything that a run trains."""

    params: dict[str, AdamParams]


@dataclass(frozen=True)
class Stepped:
    """Result of a step, by name: `grad_norms` before clipping, not finite where an update was skipped; `steps`, the updates so far."""

    grad_norms: dict[str, float]
    steps: dict[str, int]


@dataclass(frozen=True)
class AdapterNames:
    """Names of some of a trainer's adapters."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class NewAdapter:
    """A fresh adapter, or one from the PEFT folder `folder`.

    Attributes:
        alpha: the adapter's output is scaled by alpha / rank.
        seed: equal seeds give equal weights.
        modules: kinds of layers, of `offbeat.model.lora.LAYER_KINDS`, for which a fresh adapter has weights.
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
        name: name of the adapter that is saved or loaded; "" is everything that a run trains.
        optimizer: whether an adapter's moments and step count are loaded, too; otherwise they are fresh.
        keeps: whether this rank puts files that ranks have saved on its machine in place, because rank 0 may be on another one.
    """

    path: str
    name: str = ""
    optimizer: bool = True
    keeps: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.path)


@dataclass(frozen=True)
class LoadedStep:
    """Step of a loaded checkpoint: number of training steps of a run, or of optimizer steps of an adapter."""

    step: int


@dataclass(frozen=True)
class BroadcastRequest:
    """Broadcast a version to `num_receivers` engines.

    Attributes:
        host: address of rank 0's machine, as engines reach it.
        timeout_s: seconds within which an engine must receive the version.
        by_folder: whether engines that a broadcast does not reach can read a folder that rank 0 writes.
    """

    host: str
    num_receivers: int
    timeout_s: float
    by_folder: bool = True


@dataclass(frozen=True)
class WriteRequest:
    """Write the weights to a new folder, or offer them by broadcast, and score the canary under them.

    Attributes:
        folder: will hold the whole model in Hugging Face's format, or an adapter in PEFT's.
        dtype: number format of a whole model; an adapter is always float32.
        name: name of the adapter; "" is everything that a run trains.
        base: folder of the version written last, if the changes since are enough; empty for whole weights.
        is_there: whether the folder has these weights already, so that they are scored and hashed, and nothing is written.
    """

    folder: str
    dtype: Dtype
    canary: tuple[int, ...]
    name: str = ""
    broadcast: BroadcastRequest | None = None
    base: str = ""
    is_there: bool = False


@dataclass(frozen=True)
class Written:
    """The weights that rank 0 wrote, or offers at the address `broadcast`; `fingerprint` is empty on other ranks.

    Attributes:
        num_bytes: size of the tensors that were written or are offered; of changes, where there are any.
        base: folder of the version to which only the changes were written, or are offered beside the whole; empty if there are none.
    """

    fingerprint: str
    canary_logprobs: tuple[float, ...]
    broadcast: str = ""
    num_bytes: int = 0
    base: str = ""


@dataclass(frozen=True)
class ExportRequest:
    """Write the model as a Hugging Face folder, with the tokenizer from the folder `tokenizer`."""

    path: str
    tokenizer: str
    dtype: Dtype


@dataclass(frozen=True)
class CanaryTokens:
    """Tokens to be scored under the base model, without any adapter."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class CanaryScores:
    """Log-probability of each of the canary's tokens but the first."""

    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class StoreAddress:
    """Address of rank 0's store, through which ranks meet; `server` is its process, None in the request."""

    host: str
    port: int
    server: Card | None = None


@dataclass(frozen=True)
class BuildRequest:
    """Write a tiny model with random weights to `folder`, beside the tokenizer in it; `tiny` is a `TinyConfig` as JSON."""

    folder: str
    tiny: str
    vocab_size: int
    eos_token_id: int
    pad_token_id: int | None
    seed: int

    @property
    def origin(self) -> list[str | int | None]:
        """Everything that the weights depend on."""
        return [self.tiny, self.vocab_size, self.eos_token_id, self.pad_token_id, self.seed]


@dataclass(frozen=True)
class JoinRequest:
    """A rank's place among peers, and trainee: `config` is all settings as JSON, `model` a folder or hub id of initial weights."""

    rank: int
    world: int
    store: StoreAddress
    config: str
    model: str
    trains: Trainee = "policy"
