"""The service's own types: requests and outcomes of clients' work, independent of wire format and torch.

`wire` makes requests from bodies, and answers from outcomes. All code in between uses only these types.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from offbeat.chat.shaping import PLAIN, Shaping
from offbeat.data.batch import Batch

Category = Literal["user", "server", "unknown"]
CheckpointKind = Literal["training", "sampler", "external"]


@dataclass(frozen=True)
class Caller:
    """Owner who makes a request, according to the API key."""

    owner: str


@dataclass(frozen=True)
class LoraSpec:
    """The adapter that a model trains; its output is scaled by alpha / rank."""

    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True


@dataclass(frozen=True)
class Layout:
    """Layout of one datum's targets, by which their log-probabilities are returned in the same form.

    Attributes:
        shape: shape of the target tensor, [L] or [L, K].
        cells: [M] int64, flat indices of the cells that a sparse tensor lists, such as [1, 4]; None if all cells are present.
    """

    shape: tuple[int, ...]
    cells: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class SparseArray:
    """Some cells of an array: values [M] and their flat indices [M], such as [1, 5], int64 and increasing; all other cells are empty."""

    values: np.ndarray
    cells: np.ndarray
    shape: tuple[int, ...]

    def dense(self) -> np.ndarray:
        """Return the whole array, [L] or [L, K], with 0 in empty cells. To be called only where an answer is written."""
        array = np.zeros(self.shape, self.values.dtype)
        array.reshape(-1)[self.cells] = self.values
        return array


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Datums of one forward or forward_backward request, the layout of each, and the patches of its images; () without images."""

    batch: Batch
    layouts: tuple[Layout, ...]
    patches: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """One sampling request.

    Attributes:
        max_tokens: None to continue to the end of the context.
        stop: strings and token IDs that end a sample, besides the end tokens; None for the end tokens alone; () to never stop.
        prompt_logprobs: whether to score the prompt, at temperature 1; of it, `prompt_logprobs_last_n` positions, or all for None.
        topk_prompt_logprobs, topk_sample_logprobs: number of top tokens wanted at each position of the prompt and of the samples.
        target_prompt_logprobs: [P, K] int64 tokens to score at each position of the prompt.
        prompt_alt_tokens_k: number of tokens to draw at each position of the prompt except the first, at the temperature.
        ignore_eos: continue past the end tokens; `stop` still ends a sample.
        shaping: penalties, biases and structures, which only completions and chats can set.
        num_patches: patches of the images in the prompt.
    """

    sampling_session_id: str
    seq_id: int
    prompt: tuple[int, ...]
    num_samples: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str | int, ...] | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: SparseArray | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    ignore_eos: bool = False
    shaping: Shaping = PLAIN
    num_patches: int = 0


@dataclass(frozen=True)
class Payload:
    """An encoded answer to a client; e.g. content type "application/json" and the bytes."""

    content_type: str
    data: bytes


# -- outcomes of futures -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelCreated:
    model_id: str


@dataclass(frozen=True, eq=False)
class PassDone:
    """Outcome of a forward or forward_backward pass.

    Attributes:
        logprobs: for each datum, float32 in the shape of its targets; sparse where the targets were.
        losses: [N] float32, each datum's summed loss.
        metrics: values by `name:reduction`, such as "loss:sum".
    """

    logprobs: tuple[np.ndarray | SparseArray, ...]
    losses: np.ndarray
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StepDone:
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint that can be loaded was saved, or an export was written."""

    path: str
    kind: CheckpointKind
    size_bytes: int


@dataclass(frozen=True)
class WeightsLoaded:
    """A model, possibly a new one, continues from a checkpoint."""

    path: str
    model_id: str


@dataclass(frozen=True)
class SamplerSaved:
    """Weights to sample were saved, with a path or with the sampler made of them."""

    path: str = ""
    sampling_session_id: str = ""


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The K top tokens at each of L positions: ids [L, K] int32 and logprobs [L, K] float32; ID -1 marks an empty cell."""

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """One sample: tokens [L] int32, including its end tokens, and their logprobs [L] float32."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: Literal["stop", "length"]
    top: TopTokens | None = None


@dataclass(frozen=True, eq=False)
class Sampled:
    """Outcome of a sampling request.

    Attributes:
        prompt_logprobs: [P] float32; NaN where there is no score, as at the first position.
        topk_prompt: top tokens of all P positions; the first one is empty.
        target_prompt_logprobs: float32 scores of the request's target tokens, in their cells.
        prompt_alt: tokens drawn at all P positions; the first one is empty.
    """

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt: TopTokens | None = None
    target_prompt_logprobs: SparseArray | None = None
    prompt_alt: TopTokens | None = None


@dataclass(frozen=True)
class Failed:
    """Failed work: one sentence, and the category of the fault."""

    message: str
    category: Category


Outcome = ModelCreated | PassDone | StepDone | CheckpointSaved | WeightsLoaded | SamplerSaved | Sampled | Failed


# -- answers at once -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pending:
    """State of a future that has not ended: "active", or the reason of a pause, and an explanation for people, empty if there is none."""

    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    reason: str = ""


@dataclass(frozen=True)
class ModelInfo:
    """A model, which REST endpoints call a run; times are seconds since the epoch."""

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
    """A sampler of the base model, or of the checkpoint at `model_path`; an ephemeral one has neither path nor name."""

    sampler_id: str
    base_model: str
    model_path: str | None


@dataclass(frozen=True)
class SessionInfo:
    session_id: str
    run_ids: tuple[str, ...]
    sampler_ids: tuple[str, ...]
    metadata: Mapping[str, str]
    display_name: str


# -- standing, for the status page and metrics ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QueueStatus:
    """Requests that wait or run: their number, their tokens, and the age of the oldest."""

    jobs: int = 0
    tokens: int = 0
    oldest_wait_s: float = 0.0


@dataclass(frozen=True)
class ModelStatus:
    """A model of an active session; `trained_per_s` and `sampled_per_s` are tokens per second over the last seconds."""

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
    """An engine, and the names of the adapters that it holds."""

    name: str
    state: str
    adapters: tuple[str, ...]
    outstanding_tokens: int


@dataclass(frozen=True)
class FailedRequest:
    """A failed request; the time is in seconds since the epoch."""

    time: float
    request_id: str
    owner: str
    message: str


@dataclass(frozen=True)
class Incident:
    """A failure of the trainers or of an engine, or its recovery; the time is in seconds since the epoch."""

    time: float
    who: str
    text: str


@dataclass(frozen=True)
class IncidentCounts:
    """Counts since the start; `rank_deaths` are train ranks whose process ended, `failed_loads` adapters that an engine could not load."""

    rank_deaths: int = 0
    trainer_restarts: int = 0
    quarantines: int = 0
    engine_restarts: int = 0
    failed_loads: int = 0


@dataclass(frozen=True)
class ProcessStatus:
    """A process of the server including its children, and their resident memory."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Status:
    """State of the service at one moment; tokens count from its start. The core does not fill in the fields after `failures`."""

    base_model: str
    trainers_alive: bool
    trained_tokens: int
    sampled_tokens: int
    training: QueueStatus
    models: tuple[ModelStatus, ...]
    owners: tuple[OwnerStatus, ...]
    engines: tuple[EngineStatus, ...]
    failures: tuple[FailedRequest, ...]
    sampling: QueueStatus = QueueStatus()
    incidents: tuple[Incident, ...] = ()
    counts: IncidentCounts = IncidentCounts()
    processes: tuple[ProcessStatus, ...] = ()
