"""The application as a whole."""

import asyncio
from typing import Any

from http_serving import Client, Serve

ENDPOINTS = [
    ("POST", "client/config"), ("POST", "client/dynamic_config"), ("GET", "get_server_capabilities"), ("POST", "telemetry"),
    ("POST", "create_session"), ("POST", "session_heartbeat"), ("POST", "sessions/s/finish"), ("POST", "create_model"),
    ("POST", "get_info"), ("POST", "forward_backward"), ("POST", "optim_step"), ("POST", "save_weights"), ("POST", "load_weights"),
    ("POST", "save_weights_for_sampler"), ("POST", "save_weights_external"), ("POST", "create_sampling_session"), ("GET", "samplers/s"),
    ("POST", "asample"), ("POST", "retrieve_future"), ("GET", "training_runs"), ("GET", "training_runs/r"),
    ("GET", "training_runs/r/checkpoints"), ("GET", "checkpoints"), ("DELETE", "training_runs/r/checkpoints/weights/n"),
    ("POST", "training_runs/r/checkpoints/weights/n/publish"), ("DELETE", "training_runs/r/checkpoints/weights/n/publish"),
    ("PUT", "training_runs/r/checkpoints/weights/n/ttl"), ("GET", "training_runs/r/checkpoints/external_weights/n/external_weights_urls"),
    ("GET", "training_runs/r/checkpoints/sampler_weights/n/archive"), ("POST", "forward"), ("POST", "weights_info"),
    ("POST", "copy_weights"), ("POST", "copy_weights"), ("GET", "sessions"), ("GET", "sessions/s")]
NONSENSE: list[Any] = [b"", b"\xff\x00", b"[]", b"null", {}, {"model_id": None}, {"session_id": "../..", "seq_id": 2**70}, b"[" * 5000]


def test_every_endpoint_wants_a_key_and_answers_nonsense_with_a_sentence(serve: Serve) -> None:
    async def body(client: Client) -> None:
        async def one(method: str, path: str, content: Any) -> None:
            answer = await client.ask(method, f"/api/v1/{path}", content, headers={"content-type": "application/x-protobuf"})
            assert answer.status < 500, (method, path, content, answer.body)
            if answer.status >= 400:
                assert answer.detail and "\n" not in answer.detail and len(answer.detail) < 600, (path, content, answer.detail)

        for method, path in ENDPOINTS:
            assert (await client.of("").ask(method, f"/api/v1/{path}")).status == 401, path
            await asyncio.gather(*(one(method, path, content) for content in NONSENSE))

    serve(body)
