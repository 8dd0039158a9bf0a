"""Immediate answers, as dictionaries to be encoded as JSON. Used by `app`."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from offbeat.service.ids import CheckpointPath
from offbeat.service.types import CheckpointInfo, LoraSpec, ModelInfo, Pending, SamplerInfo, SessionInfo

Answer = dict[str, Any]


def pending(request_id: str, state: Pending) -> Answer:
    """Describe a future that has not ended; sent with status 408, upon which clients retry at once."""
    reason = {"queue_state_reason": state.reason} if state.reason else {}
    return {"type": "try_again", "request_id": request_id, "queue_state": state.queue_state, **reason}


def sample_accepted(request_id: str, *, num_samples: int) -> Answer:
    """Confirm a sampling request under its ID; each sample has an ID of its own."""
    return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{index}" for index in range(num_samples)]}


def capabilities(trained: Mapping[str, int], sampled: Mapping[str, int]) -> Answer:
    """List names and context sizes of the models that are trained and sampled, and of the ones that are only sampled."""
    return {"supported_models": [
        {"model_name": name, "max_context_length": context, "trainable": trainable, "sampleable": True}
        for models, trainable in ((trained, True), (sampled, False)) for name, context in models.items()]}


def model_info(model: ModelInfo, *, tokenizer_id: str) -> Answer:
    """Describe a model to the client that trains it."""
    return {
        "type": "get_info", "model_id": model.model_id, "model_name": model.base_model, "is_lora": True, "lora_rank": model.lora.rank,
        "model_data": {"model_name": model.base_model, "tokenizer_id": tokenizer_id}}


def training_run(
    model: ModelInfo, *, last_checkpoint: CheckpointInfo | None = None, last_sampler_checkpoint: CheckpointInfo | None = None,
) -> Answer:
    return {
        "training_run_id": model.model_id, "base_model": model.base_model, "model_owner": model.owner, "is_lora": True, "corrupted": False,
        "lora_rank": model.lora.rank, "last_request_time": time_text(model.last_request),
        "last_checkpoint": last_checkpoint and checkpoint(last_checkpoint),
        "last_sampler_checkpoint": last_sampler_checkpoint and checkpoint(last_sampler_checkpoint), "user_metadata": dict(model.metadata)}


def training_runs(runs: Iterable[Answer], *, limit: int, offset: int, total: int) -> Answer:
    return {"training_runs": list(runs), "cursor": {"offset": offset, "limit": limit, "total_count": total}}


def checkpoint(info: CheckpointInfo) -> Answer:
    path = CheckpointPath(info.run_id, info.kind, info.name)
    return {
        "checkpoint_id": path.short, "checkpoint_type": info.kind, "time": time_text(info.created), "tinker_path": str(path),
        "size_bytes": info.size_bytes, "public": info.public, "user_metadata": dict(info.metadata),
        "expires_at": None if info.expires is None else time_text(info.expires)}


def checkpoints(infos: Iterable[CheckpointInfo], *, limit: int, offset: int, total: int) -> Answer:
    return {"checkpoints": [checkpoint(info) for info in infos], "cursor": {"offset": offset, "limit": limit, "total_count": total}}


def weights_info(base_model: str, lora: LoraSpec) -> Answer:
    """Describe a checkpoint's weights to a client that is about to load it."""
    return {
        "base_model": base_model, "is_lora": True, "lora_rank": lora.rank, "train_unembed": False,
        "train_mlp": lora.train_mlp, "train_attn": lora.train_attn}


def external_weights_urls(urls: Mapping[str, str], *, expires: float) -> Answer:
    """List the URLs of an export's files by name; `expires` is in seconds since the epoch."""
    return {"urls": dict(urls), "expires": time_text(expires)}


def archive_url(url: str, *, expires: float) -> Answer:
    """Give the URL of an adapter's archive; `expires` is in seconds since the epoch."""
    return {"url": url, "expires": time_text(expires)}


def sampler(info: SamplerInfo) -> Answer:
    return {"sampler_id": info.sampler_id, "base_model": info.base_model, "model_path": info.model_path}


def session(info: SessionInfo) -> Answer:
    return {
        "training_run_ids": list(info.run_ids), "sampler_ids": list(info.sampler_ids), "user_metadata": dict(info.metadata),
        "display_name": info.display_name or None}


def time_text(seconds: float) -> str:
    """Format a time since the epoch for the protocol, in ISO 8601 and UTC: 0 is e.g. "1970-01-01T00:00:00+00:00"."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
