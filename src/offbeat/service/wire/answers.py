"""Encodes outcomes of futures for clients: results of passes and samples as protocol buffers, all others as JSON. Given to `futures`."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from offbeat.service.types import (
    CheckpointSaved,
    Failed,
    ModelCreated,
    Outcome,
    PassDone,
    Payload,
    Sampled,
    SampledSequence,
    SamplerSaved,
    SparseArray,
    StepDone,
    TopTokens,
    WeightsLoaded,
)
from offbeat.service.wire import proto
from offbeat.service.wire.schema import FLOAT32, INT64, LENGTH, STOP

_NO_LOGPROB = -99999.0
"""Value in empty cells of top tokens."""
_SAVES = {"training": "save_weights", "sampler": "save_weights_for_sampler", "external": "save_weights_external"}


def encode(outcome: Outcome) -> Payload:
    match outcome:
        case PassDone():
            return _proto("ForwardBackwardOutput", _pass(outcome))
        case Sampled():
            return _proto("SampleResponse", _samples(outcome))
    return Payload("application/json", msgspec.json.encode(_fields_of(outcome)))


def _proto(kind: str, message: Mapping[str, Any]) -> Payload:
    return Payload("application/x-protobuf", proto.encode(kind, message))


def _fields_of(outcome: Outcome) -> dict[str, Any]:
    match outcome:
        case ModelCreated():
            return {"type": "create_model", "model_id": outcome.model_id}
        case StepDone():  # JSON has no NaN, and clients accept none
            return {"metrics": {name: value for name, value in outcome.metrics.items() if math.isfinite(value)}}
        case CheckpointSaved():
            return {"type": _SAVES[outcome.kind], "path": outcome.path, "size_bytes": outcome.size_bytes}
        case WeightsLoaded():
            return {"type": "load_weights", "path": outcome.path, "model_id": outcome.model_id}
        case SamplerSaved():
            weights = {"path": outcome.path} if outcome.path else {"sampling_session_id": outcome.sampling_session_id}
            return {"type": "save_weights_for_sampler", **weights}
        case Failed():
            return {"error": outcome.message, "category": outcome.category}
    raise AssertionError(f"{type(outcome).__name__} is no outcome that is JSON")


def _pass(outcome: PassDone) -> Mapping[str, Any]:
    assert all(name.count(":") == 1 for name in outcome.metrics), "clients read metrics as name:reduction"
    groups = itertools.groupby(outcome.logprobs, key=lambda logprobs: logprobs.shape[1:])  # clients accept them dense only
    return {
        "loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": [_record(shape, list(group)) for shape, group in groups],
        "metrics": outcome.metrics}


def _record(shape: tuple[int, ...], logprobs: Sequence[np.ndarray | SparseArray]) -> Mapping[str, Any]:
    """Encode neighboring datums, float32 [L] or [L, K] each, whose shapes differ only in L; `shape` is () or (K,)."""
    ends = np.cumsum([0, *(math.prod(datum.shape) for datum in logprobs)])
    values = np.zeros(ends[-1], "<f4")
    for datum, start, end in zip(logprobs, ends[:-1], ends[1:], strict=True):
        if isinstance(datum, SparseArray):
            values[start + datum.cells] = datum.values
        else:
            values[start:end] = datum.reshape(-1)
    field = {"data": values.data.cast("B"), "offsets": (4 * ends).astype("<i8").tobytes(), "dtype": FLOAT32, "trailing_shape": shape}
    return {"type_tag": "ArrayRecord", "fields": {"logprobs": field}, "num_datums": len(logprobs)}


def _samples(outcome: Sampled) -> Mapping[str, Any]:
    message: dict[str, Any] = {"sequences": [_sequence(sequence) for sequence in outcome.sequences]}
    if outcome.prompt_logprobs is not None:
        message["prompt_logprobs"] = _floats(outcome.prompt_logprobs)
    if outcome.topk_prompt is not None:
        message["topk_prompt_logprobs"] = _top(outcome.topk_prompt)
    if outcome.target_prompt_logprobs is not None:  # clients expect no row for the first position, which cannot be scored
        message["target_prompt_logprobs"] = _tensor(outcome.target_prompt_logprobs.dense()[1:])
    if (alt := outcome.prompt_alt) is not None:
        message["prompt_alt_tokens"] = {
            "tokens": {"dense": alt.ids[1:].astype("<i8").tobytes(), "dtype": INT64, "shape": alt.ids[1:].shape},
            "logprobs": _tensor(alt.logprobs[1:])}
    return message


def _sequence(sequence: SampledSequence) -> Mapping[str, Any]:
    return {
        "stop_reason": STOP if sequence.stop_reason == "stop" else LENGTH, "tokens": _ints(sequence.tokens),
        "logprobs": _floats(sequence.logprobs), "topk_sampled_logprobs": None if sequence.top is None else _top(sequence.top)}


def _top(top: TopTokens) -> Mapping[str, Any]:
    empty = top.ids < 0
    ids, logprobs = np.where(empty, 0, top.ids), np.where(empty, _NO_LOGPROB, top.logprobs)
    return {"token_ids": _ints(ids), "logprobs": _floats(logprobs), "k": ids.shape[1], "length": ids.shape[0]}


def _tensor(values: np.ndarray) -> Mapping[str, Any]:
    return {"dense": _floats(values), "dtype": FLOAT32, "shape": values.shape}


def _floats(values: np.ndarray) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


def _ints(values: np.ndarray) -> bytes:
    return values.astype("<i4", copy=False).tobytes()
