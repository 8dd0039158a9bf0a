"""JSON bodies of all requests except sampling: fields, ranges and defaults, and conversions to the service's terms. Used by `app`."""

import secrets
from typing import Annotated

import msgspec

from offbeat.algorithms.adam import AdamParams
from offbeat.errors import ConfigError
from offbeat.service.encryption import MAX_RECIPIENTS, read_recipient
from offbeat.service.types import LoraSpec
from offbeat.service.wire.json_body import Body, Count, Label, Metadata, Seed, Text, TrainingBody, TrainingSeq, TtlSeconds, metadata_of

_MAX_TAG_BYTES = 16384


def _refuse_token(token: str | None) -> None:
    if token:
        raise ValueError("this server has no weights_access_token; let the owner publish the checkpoint")


class CreateSessionBody(Body):
    tags: Annotated[tuple[Label, ...], msgspec.Meta(max_length=100)] = ()
    user_metadata: Metadata | None = None
    display_name: Label | None = None

    def __post_init__(self) -> None:
        metadata_of(self.user_metadata)
        if sum(len(tag.encode(errors="surrogatepass")) for tag in self.tags) > _MAX_TAG_BYTES:
            raise ValueError(f"tags may have {_MAX_TAG_BYTES} bytes in all; keep larger things elsewhere")


class SessionBody(Body):
    """Body of POST session_heartbeat."""

    session_id: Text


class FinishReason(Body):
    """Reason of a client's end of its session, such as "success", "errored" or "interrupted"."""

    type: Text


class FinishSessionBody(Body):
    """Body of POST sessions/ID/finish."""

    reason: FinishReason


class OptimizerBody(Body):
    """The optimizer that a model keeps for its whole life."""

    type: str = "adamw"

    def __post_init__(self) -> None:
        if self.type != "adamw":
            raise ValueError(f"this server has no optimizer {self.type[:80]!r}; use adamw")


class LoraBody(Body):
    """Settings of a model's adapter."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def __post_init__(self) -> None:
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("lora_config trains nothing; set one of train_attn, train_mlp and train_unembed")


class CreateModelBody(Body):
    session_id: Text
    model_seq_id: Count
    base_model: Text
    lora_config: LoraBody | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerBody | None = None

    def __post_init__(self) -> None:
        metadata_of(self.user_metadata)
        if self.lora_config is None:
            raise ValueError("lora_config is missing; this server trains LoRA adapters only")

    def lora(self, *, alpha: float) -> LoraSpec:
        """Return the adapter; the server chooses alpha, which the protocol leaves open, and the seed if none is given."""
        assert self.lora_config is not None, "checked when it was read"
        config = self.lora_config
        return LoraSpec(
            rank=config.rank, alpha=alpha, seed=secrets.randbits(31) if config.seed is None else config.seed,
            train_attn=config.train_attn, train_mlp=config.train_mlp)


class ModelBody(Body):
    """Body of POST get_info."""

    model_id: Text


class AdamBody(Body):
    """Settings of one optimizer step, with the ranges of `AdamParams`."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(TrainingBody):
    adam_params: AdamBody | None = None

    def __post_init__(self) -> None:
        if self.adam_params is None:
            raise ValueError("adam_params is missing; this server has no other optimizer than adamw")
        try:
            self.params()
        except ConfigError as exc:
            raise ValueError(f"adam_params is wrong: {exc}") from exc

    def params(self) -> AdamParams:
        assert self.adam_params is not None, "checked when it was read"
        given = self.adam_params
        return AdamParams(
            lr=given.learning_rate, beta1=given.beta1, beta2=given.beta2, eps=given.eps, weight_decay=given.weight_decay,
            clip_norm=given.grad_clip_norm)


class SaveWeightsBody(TrainingBody):
    """Body of POST save_weights; `path` is the checkpoint's name, None leaves it to the server."""

    path: Text | None = None
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None

    def __post_init__(self) -> None:
        metadata_of(self.user_metadata)


class SaveForSamplerBody(TrainingBody):
    """Body of POST save_weights_for_sampler: saves under a name, or directly for a sampler.

    Its `kind` makes no difference: "inflight" samplers, whose weights may change, get weights that never change, as "snapshot" ones do.
    """

    path: Text | None = None
    sampling_session_seq_id: Count | None = None
    ttl_seconds: TtlSeconds | None = None
    user_metadata: Metadata | None = None

    def __post_init__(self) -> None:
        metadata_of(self.user_metadata)
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("give either path, to save by name, or sampling_session_seq_id, for a sampler without a name")


class SaveExternalBody(TrainingBody):
    """Body of POST save_weights_external; with recipients, the exported files are encrypted for them."""

    path: Text
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: list[str] | None = None

    def __post_init__(self) -> None:
        if self.age_encryption_recipients:
            if len(self.age_encryption_recipients) > MAX_RECIPIENTS:
                raise ValueError(f"age_encryption_recipients may name {MAX_RECIPIENTS}, got {len(self.age_encryption_recipients)}")
            for recipient in self.age_encryption_recipients:
                read_recipient(recipient)


class LoadWeightsBody(Body):
    """Body of POST load_weights, which loads into an existing model or, if `creates`, into a new one."""

    path: Text
    optimizer: bool
    model_id: Text | None = None
    seq_id: TrainingSeq | None = None
    session_id: Text | None = None
    model_seq_id: Count | None = None
    base_model: Text | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerBody | None = None
    weights_access_token: str | None = None

    def __post_init__(self) -> None:
        metadata_of(self.user_metadata)
        ours, theirs = (self.model_id, self.seq_id), (self.session_id, self.model_seq_id)
        if not ((None not in ours and theirs == (None, None)) or (None not in theirs and ours == (None, None))):
            raise ValueError("give either model_id and seq_id, to load into a model, or session_id and model_seq_id, for a new one")
        _refuse_token(self.weights_access_token)

    @property
    def creates(self) -> bool:
        return self.session_id is not None


class CreateSamplingSessionBody(Body):
    session_id: Text
    sampling_session_seq_id: Count
    base_model: Text | None = None
    model_path: Text | None = None

    def __post_init__(self) -> None:
        if self.base_model is None and self.model_path is None:
            raise ValueError("give base_model or model_path")


class RetrieveFutureBody(Body):
    request_id: Text


class TtlBody(Body):
    """Body of PUT training_runs/RUN/checkpoints/KIND/NAME/ttl; None keeps the checkpoint for good."""

    ttl_seconds: TtlSeconds | None


class WeightsInfoBody(Body):
    tinker_path: Text


class CopyWeightsBody(Body):
    """Body of POST copy_weights. There are no projects here, so a session and a number name the run of the copy."""

    source_path: Text
    session_id: Text | None = None
    model_seq_id: Count | None = None
    ttl_seconds: TtlSeconds | None = None
    weights_access_token: str | None = None

    def __post_init__(self) -> None:
        if self.session_id is None or self.model_seq_id is None:
            raise ValueError("give session_id and model_seq_id; this server has no projects to copy weights to")
        _refuse_token(self.weights_access_token)
