"""A client of the service that speaks its protocol by hand: bodies as they go over the wire, and answers as they come."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from http_serving import Answer, Client
from offbeat.service.wire import proto

PROTOBUF = {"content-type": "application/x-protobuf"}


def datum(tokens: Sequence[int], weights: Sequence[float] | None = None) -> dict[str, Any]:
    """Every token but the first is to be predicted."""
    targets = np.array(tokens[1:], "<i8")
    weighted = np.ones(len(targets), "<f4") if weights is None else np.array(weights, "<f4")
    return {
        "model_input": [{"encoded_text": {"tokens": np.array(tokens[:-1], "<i4").tobytes()}}],
        "loss_fn_inputs": {
            "target_tokens": {"dense": targets.tobytes(), "dtype": 2, "shape": targets.shape},
            "weights": {"dense": weighted.tobytes(), "dtype": 1, "shape": weighted.shape}}}


def pass_body(
    model_id: str, seq_id: int, data: Sequence[dict[str, Any]], *, loss: str = "cross_entropy", forward_only: bool = False,
) -> bytes:
    """The body of forward_backward."""
    return proto.encode("ForwardBackwardRequest", {
        "model_id": model_id, "seq_id": seq_id, "data": list(data), "loss_fn": loss, "forward_only": forward_only})


def sample_body(sampler: str, seq_id: int, prompt: Sequence[int], *, num_samples: int = 1, **params: Any) -> dict[str, Any]:
    """The body of asample; `params` are sampling_params."""
    return {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}, "sampling_params": params, "seq_id": seq_id,
        "sampling_session_id": sampler, "num_samples": num_samples, "type": "sample"}


async def finished(client: Client, ack: Answer) -> Any:
    """What a request came to: JSON, or a message as a dictionary."""
    assert ack.status == 200, ack.body
    while (answer := await client.post("retrieve_future", {"request_id": ack.json["request_id"]})).status == 408:
        assert answer.json["type"] == "try_again"
    assert answer.status == 200, answer.body
    if answer.headers["content-type"] == "application/json":
        return answer.json
    kind = "SampleResponse" if ":sample:" in ack.json["request_id"] else "ForwardBackwardOutput"
    return proto.decode_proto(kind, answer.body, max_fields=100_000)


async def session_of(client: Client) -> str:
    """A new session."""
    return (await client.post("create_session", {"tags": [], "sdk_version": "0.38.0", "user_metadata": {"a": "b"}})).json["session_id"]


async def model_of(client: Client, session_id: str, *, seq: int = 0, base_model: str = "org/small", **lora: Any) -> str:
    """A new model."""
    body = {"session_id": session_id, "model_seq_id": seq, "base_model": base_model, "lora_config": {"rank": 4, "seed": 1, **lora}}
    created = await finished(client, await client.post("create_model", body))
    assert created["type"] == "create_model", created
    return created["model_id"]


async def base_sampler(client: Client, *, base_model: str = "org/small") -> str:
    """A new sampler of the base model, in a session of its own."""
    body = {"session_id": await session_of(client), "sampling_session_seq_id": 0, "base_model": base_model}
    return (await client.post("create_sampling_session", body)).json["sampling_session_id"]
