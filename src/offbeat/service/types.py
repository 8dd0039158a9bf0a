"""What the service deals in: requests and outcomes of tenants' work, in its own terms. No wire, no torch.

`wire` makes these from what clients send and turns outcomes into answers; `backend` carries them out. Everything between knows only these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from offbeat.data.batch import Batch

Category = Literal["user", "server", "unknown"]
CheckpointKind = Literal["training", "sampler", "external"]


@dataclass(frozen=True)
class Caller:
    """Who asks, as the API key says."""

    owner: str


@dataclass(frozen=True)
class LoraSpec:
    """The adapter that a model trains; alpha over rank scales its output."""

    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True


@dataclass(frozen=True)
class Layout:
    """How one datum's targets were laid out, so that their log-probabilities go back in the same form.

    Attributes:
        shape: of the target tensor, [L] or [L, K].
        cells: [m] int64, flat indices of the cells that a sparse tensor lists; None where all are.
    """

    shape: tuple[int, ...]
    cells: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class SparseArray:
    """Some cells of an array, as values [m] with their flat indices, int64 and rising; all others are empty."""

    values: np.ndarray
    cells: np.ndarray
    shape: tuple[int, ...]

    def dense(self) -> np.ndarray:
        """All cells, 0 where there was none. To be called where an answer is written, and nowhere before."""
        array = np.zeros(self.shape, self.values.dtype)
        array.reshape(-1)[self.cells] = self.values
        return array


@dataclass(frozen=True, eq=False)
class TrainingData:
    """The datums of one forward or forward-backward, and the layout of each."""

    batch: Batch
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """One call for samples.

    Attributes:
        max_tokens: None goes on to the end of the context.
        stop: strings or token ids that end a sample besides the end tokens; None for the end tokens alone; () never stops.
        prompt_logprobs: score the prompt, at temperature 1.
        topk_prompt_logprobs, topk_sample_logprobs: likeliest tokens wanted at each position of the prompt, of the samples.
        target_prompt_logprobs: [P, K] int64 tokens to score at each position of the prompt.
        prompt_alt_tokens_k: tokens to draw at each position of the prompt but the first, at the temperature.
        prompt_logprobs_last_n: score only the last n positions; None for all.
    """

    sampling_session_id: str
    seq_id: int
    prompt: tuple[int, ...]
    num_samples: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: SparseArray | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None


@dataclass(frozen=True)
class Payload:
    """An answer as it goes to the client."""

    content_type: str
    data: bytes


# -- outcomes of futures -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelCreated:
    """A model is there."""

    model_id: str


@dataclass(frozen=True, eq=False)
class PassDone:
    """A forward, or forward and backward.

    Attributes:
        logprobs: of each datum, float32 in the shape of its targets; sparse where those were.
        losses: [N] float32, the loss summed over each datum.
        metrics: by `name:reduction`; loss:sum among them.
    """

    logprobs: tuple[np.ndarray | SparseArray, ...]
    losses: np.ndarray
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StepDone:
    """An optimizer step."""

    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint that can be loaded, or an export."""

    path: str
    kind: CheckpointKind
    size_bytes: int


@dataclass(frozen=True)
class WeightsLoaded:
    """A model goes on from a checkpoint; a new one if that was asked for."""

    path: str
    model_id: str


@dataclass(frozen=True)
class SamplerSaved:
    """Weights that can be sampled: by a path, or by the sampler made of them."""

    path: str = ""
    sampling_session_id: str = ""


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The K likeliest tokens at each of L positions: ids [L, K] int32 and logprobs [L, K] float32; -1 marks an empty cell."""

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """One sample: tokens [L] int32, the stopping ones included, and their logprobs [L] float32."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: Literal["stop", "length"]
    top: TopTokens | None = None


@dataclass(frozen=True, eq=False)
class Sampled:
    """What a call for samples gave.

    Attributes:
        prompt_logprobs: [P] float32, NaN where there is none, as at the first position.
        topk_prompt: over all P positions, the first one empty.
        target_prompt_logprobs: of the request's tokens, float32 in their cells.
        prompt_alt: tokens that were drawn, over all P positions, the first one empty.
    """

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt: TopTokens | None = None
    target_prompt_logprobs: SparseArray | None = None
    prompt_alt: TopTokens | None = None


@dataclass(frozen=True)
class Failed:
    """Work that failed: one sentence, and whose fault it was."""

    message: str
    category: Category


Outcome = ModelCreated | PassDone | StepDone | CheckpointSaved | WeightsLoaded | SamplerSaved | Sampled | Failed


# -- answers at once -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pending:
    """A future that has not ended.

    Attributes:
        queue_state: "active", or why it does not move.
        reason: for people; empty if there is none.
    """

    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    reason: str = ""


@dataclass(frozen=True)
class ModelInfo:
    """A model, or a run as the REST endpoints call it; times are seconds since the epoch."""

    model_id: str
    owner: str
    base_model: str
    lora: LoraSpec
    last_request: float
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint; times are seconds since the epoch."""

    run_id: str
    kind: CheckpointKind
    name: str
    created: float
    size_bytes: int
    public: bool
    expires: float | None
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class SamplerInfo:
    """A sampler: of the base model, or of the checkpoint at `model_path`; an ephemeral one has neither path nor name."""

    sampler_id: str
    base_model: str
    model_path: str | None


@dataclass(frozen=True)
class SessionInfo:
    """A session with what belongs to it."""

    session_id: str
    run_ids: tuple[str, ...]
    sampler_ids: tuple[str, ...]
    metadata: Mapping[str, str]
    display_name: str


# -- standing, for the status page and metrics ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QueueStatus:
    """Requests that wait or run, their tokens, and how long the oldest has been there."""

    jobs: int = 0
    tokens: int = 0
    oldest_wait_s: float = 0.0


@dataclass(frozen=True)
class ModelStatus:
    """A model of a session that lasts.

    Attributes:
        step: counts optimizer steps.
        resident: the trainers hold it.
        trained_per_s, sampled_per_s: tokens over the last seconds.
    """

    model_id: str
    owner: str
    rank: int
    step: int
    resident: bool
    last_request: float
    trained_per_s: float = 0.0
    sampled_per_s: float = 0.0


@dataclass(frozen=True)
class OwnerStatus:
    """What an owner takes up."""

    owner: str
    models: int
    queued_tokens: int
    disk_bytes: int
    queued_bytes: int = 0
    sessions: int = 0
    checkpoints: int = 0
    samplers: int = 0


@dataclass(frozen=True)
class EngineStatus:
    """An engine, and names of the adapters that it holds."""

    name: str
    state: str
    adapters: tuple[str, ...]
    outstanding_tokens: int


@dataclass(frozen=True)
class Failure:
    """A request that failed; time in seconds since the epoch."""

    time: float
    request_id: str
    owner: str
    message: str


@dataclass(frozen=True)
class Incident:
    """Something that went wrong with the trainers or an engine, or was mended; time in seconds since the epoch."""

    time: float
    who: str
    text: str


@dataclass(frozen=True)
class IncidentCounts:
    """Since the start.

    Attributes:
        rank_deaths: train ranks whose process ended.
        failed_loads: of adapters on engines.
    """

    rank_deaths: int = 0
    trainer_restarts: int = 0
    quarantines: int = 0
    engine_restarts: int = 0
    failed_loads: int = 0


@dataclass(frozen=True)
class ProcessStatus:
    """A process of the server with what it has started, and its resident memory."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Status:
    """The service at one moment; tokens are counted from its start. What stands behind `failures` is filled in by who knows it."""

    base_model: str
    trainers_alive: bool
    trained_tokens: int
    sampled_tokens: int
    training: QueueStatus
    models: tuple[ModelStatus, ...]
    owners: tuple[OwnerStatus, ...]
    engines: tuple[EngineStatus, ...]
    failures: tuple[Failure, ...]
    sampling: QueueStatus = QueueStatus()
    incidents: tuple[Incident, ...] = ()
    counts: IncidentCounts = IncidentCounts()
    processes: tuple[ProcessStatus, ...] = ()
