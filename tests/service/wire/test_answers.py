"""Answers are, field by field, what the public client reads."""

import json
import math
from typing import Any

import numpy as np
import pytest

from offbeat.service.types import (
    CheckpointSaved,
    Failed,
    ModelCreated,
    PassDone,
    Sampled,
    SampledSequence,
    SamplerSaved,
    SparseArray,
    StepDone,
    TopTokens,
    WeightsLoaded,
)
from offbeat.service.wire.answers import encode
from offbeat.service.wire.proto import decode_proto
from wire_golden import GOLDEN, golden_bytes

NONE = float("nan")


def f32(*values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def read(kind: str, data: bytes) -> Any:
    """A message without what is as good as absent."""
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if item not in (0, "")}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return bytes(value) if isinstance(value, memoryview) else value

    return plain(decode_proto(kind, data, max_fields=10_000))


def test_a_pass_is_what_the_client_reads() -> None:
    logprobs = (f32(-0.5, -1.0, -1.5), f32(-2.0), f32([-0.25, 0.0], [-0.75, -4.0]), f32(-3.0))
    metrics = {"loss:sum": 2.5, "tokens:sum": 7.0}
    payload = encode(PassDone(logprobs, f32(0, 0, 0, 0), metrics))
    assert payload.content_type == "application/x-protobuf"
    sparse = SparseArray(f32(-0.25, -0.75, -4.0), np.array([0, 2, 3]), (2, 2))
    assert encode(PassDone((*logprobs[:2], sparse, logprobs[3]), f32(0, 0, 0, 0), metrics)) == payload, "sparse ones are told dense"
    recorded = GOLDEN["output"]
    assert recorded["logprobs"] == [values.tolist() for values in logprobs]
    assert read("ForwardBackwardOutput", payload.data) == read("ForwardBackwardOutput", golden_bytes(recorded))


def test_metrics_that_clients_cannot_read_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="name:reduction"):
        encode(PassDone((f32(1),), f32(1), {"loss": 1.0}))


def test_samples_are_what_the_client_reads() -> None:
    recorded = GOLDEN["samples"]
    outcome = Sampled(
        (
            SampledSequence(
                i32(5, 6), f32(-0.5, -1.0), "length", TopTokens(i32([5, 1], [6, -1]), f32([-0.5, -1.5], [-1.0, -math.inf]))),
            SampledSequence(i32(2), f32(-2.0), "stop"),
        ),
        prompt_logprobs=f32(NONE, -1.0, -3.0),
        topk_prompt=TopTokens(i32([-1, -1], [4, 3], [7, -1]), f32([NONE, NONE], [-0.25, -1.25], [-0.5, 0.0])),
        target_prompt_logprobs=SparseArray(f32(-1.0, -2.0, -3.0), np.array([2, 4, 5]), (3, 2)))
    payload = encode(outcome)
    assert payload.content_type == "application/x-protobuf"
    assert read("SampleResponse", payload.data) == read("SampleResponse", golden_bytes(recorded))
    assert recorded["top"] == [[[[5, -0.5], [1, -1.5]], [[6, -1.0]]], None]
    assert recorded["topk_prompt_logprobs"] == [None, [[4, -0.25], [3, -1.25]], [[7, -0.5]]]


def test_tokens_drawn_in_the_place_of_the_prompts_are_told_from_the_second_position_on() -> None:
    alt = TopTokens(i32([-1, -1], [4, 3], [7, 7]), f32([0.0, 0.0], [-0.25, -1.25], [-0.5, -0.5]))
    payload = encode(Sampled((SampledSequence(i32(), f32(), "length"),), prompt_alt=alt))
    told = decode_proto("SampleResponse", payload.data, max_fields=99)["prompt_alt_tokens"]
    assert told["tokens"] == {"dense": np.array([[4, 3], [7, 7]], "<i8").tobytes(), "dtype": 2, "shape": [2, 2]}
    assert told["logprobs"] == {"dense": np.array([[-0.25, -1.25], [-0.5, -0.5]], "<f4").tobytes(), "dtype": 1, "shape": [2, 2]}


def test_a_sample_is_no_more_than_was_asked_for() -> None:
    message = decode_proto("SampleResponse", encode(Sampled((SampledSequence(i32(), f32(), "length"),))).data, max_fields=99)
    assert message == {"sequences": [{"stop_reason": 1, "tokens": b"", "logprobs": b""}]}


@pytest.mark.parametrize(("outcome", "answer"), [
    (ModelCreated("m"), {"type": "create_model", "model_id": "m"}),
    (StepDone({"grad_norm:mean": 1.5, "bad:mean": math.nan, "worse:mean": math.inf}), {"metrics": {"grad_norm:mean": 1.5}}),
    (CheckpointSaved("p", "training", 3), {"type": "save_weights", "path": "p", "size_bytes": 3}),
    (CheckpointSaved("p", "external", 3), {"type": "save_weights_external", "path": "p", "size_bytes": 3}),
    (WeightsLoaded("p", "m"), {"type": "load_weights", "path": "p", "model_id": "m"}),
    (SamplerSaved(path="p"), {"type": "save_weights_for_sampler", "path": "p"}),
    (SamplerSaved(sampling_session_id="s"), {"type": "save_weights_for_sampler", "sampling_session_id": "s"}),
    (Failed("it is wrong", "user"), {"error": "it is wrong", "category": "user"}),
])
def test_other_outcomes_are_json(outcome: Any, answer: dict[str, Any]) -> None:
    payload = encode(outcome)
    assert payload.content_type == "application/json" and json.loads(payload.data) == answer
