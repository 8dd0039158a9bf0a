"""What is wrong is said in one sentence: by a 4xx or a failed future, never by a 500, a hang or a dead worker."""

import random

import httpx
import numpy as np
import pytest
from server import MODEL_NAME, Server
from tinker import types
from work import DEADLINE_S, REFUSED, adam, datum, random_tokens, ready, train_client

from conftest import Clients

GOOD = [5, 6, 7, 8]
POSTS = (
    "client/config", "create_session", "session_heartbeat", "create_model", "get_info", "forward_backward", "optim_step", "save_weights",
    "load_weights", "save_weights_for_sampler", "save_weights_external", "create_sampling_session", "asample", "retrieve_future",
    "weights_info", "telemetry")


def with_targets(targets: list[int]) -> types.Datum:
    example = datum(GOOD)
    example.loss_fn_inputs["target_tokens"] = types.TensorData.from_numpy(np.asarray(targets, np.int64))
    return example


BAD_DATA = [
    (datum([5, 10**6]), "cross_entropy", None, "token ids of 0 to"),
    (with_targets([6, -1, 8]), "cross_entropy", None, "token ids of 0 to"),
    (with_targets([6, 7]), "cross_entropy", None, "target_tokens|length|positions"),
    (datum(GOOD, weights=[1.0, float("nan"), 1.0]), "cross_entropy", None, "weights"),
    (datum(GOOD, nonsense=[1.0, 1.0, 1.0]), "cross_entropy", None, "nonsense"),
    (datum(GOOD), "importance_sampling", None, "logprobs|advantages|weights"),
    (datum(random_tokens(np.random.default_rng(0), 5000)), "cross_entropy", None, "tokens"),
    (datum(GOOD, logprobs=[0, 0, 0], advantages=[0, 0, 0]), "ppo", {"clip_lo": 0.5}, "clip_lo"),
]


@pytest.mark.parametrize(("example", "loss", "config", "words"), BAD_DATA)
def test_bad_data_is_refused_with_a_sentence(connect: Clients, example: types.Datum, loss: str, config: dict | None, words: str) -> None:
    client = train_client(connect())
    with pytest.raises(REFUSED, match=words):
        client.forward_backward([example], loss, config).result(DEADLINE_S)
    client.forward_backward([datum(GOOD)], "cross_entropy").result(DEADLINE_S)
    client.optim_step(adam()).result(DEADLINE_S)


def test_bad_calls_are_refused_with_a_sentence(connect: Clients) -> None:
    service = connect()
    with pytest.raises(REFUSED, match="rank"):
        train_client(service, rank=4096)
    with pytest.raises(REFUSED, match=MODEL_NAME):
        ready(service.create_lora_training_client(base_model="no/such-model", rank=4))
    client = train_client(service)
    for bad in ("../../etc/passwd", "a/b", "", "x" * 500):
        with pytest.raises(REFUSED, match="name|path"):
            client.save_state(bad).result(DEADLINE_S)
    for path in ("tinker://nope/weights/x", "tinker://../weights/x", "file:///etc/passwd", "tinker://a/b/c/d"):
        with pytest.raises(REFUSED):
            client.load_state(path).result(DEADLINE_S)
    sampler = ready(service.create_sampling_client(base_model=MODEL_NAME))
    for prompt, settings in (
        ([10**7], {}), ([], {}), (GOOD * 100, {}), (GOOD, {"temperature": -1.0}), (GOOD, {"top_p": 0.0}), (GOOD, {"max_tokens": 0})):
        with pytest.raises(REFUSED):
            sampler.sample(types.ModelInput.from_ints(prompt), 1, types.SamplingParams(**({"max_tokens": 4} | settings))).result(DEADLINE_S)
    assert sampler.sample(types.ModelInput.from_ints(GOOD), 1, types.SamplingParams(max_tokens=2)).result(DEADLINE_S).sequences


def test_nobody_enters_without_a_key(server: Server) -> None:
    for headers in ({}, {"X-API-Key": "wrong"}, {"X-API-Key": ""}):
        answer = httpx.post(f"{server.url}/api/v1/create_session", json={"type": "create_session"}, headers=headers)
        assert answer.status_code == 401
        assert "TINKER_API_KEY" in answer.json()["detail"]


@pytest.mark.parametrize("content_type", ["application/json", "application/x-protobuf"])
def test_noise_gets_a_4xx(server: Server, content_type: str) -> None:
    rng = random.Random(0)
    bodies = [b"", b"{", b"null", b"[]", b'{"type": 7}', b"{}" * 1000, rng.randbytes(50), rng.randbytes(5000),
        b'{"session_id": "' + b"a" * 9000]
    headers = {"X-API-Key": "tml-noise", "content-type": content_type}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30) as http:
        for path in POSTS:
            for body in bodies:
                answer = http.post(f"/api/v1/{path}", content=body)
                assert answer.status_code < 500, (path, body[:40], answer.text)
                if answer.status_code >= 400:
                    assert "Traceback" not in answer.text
        squeezed = http.post("/api/v1/forward_backward", content=rng.randbytes(100), headers={"content-encoding": "zstd"})
        assert 400 <= squeezed.status_code < 500
        for path in ("training_runs/x", "training_runs/..%2f..%2fetc/checkpoints", "samplers/x", "sessions/x", "external/x/y", "nothing"):
            assert 400 <= http.get(f"/api/v1/{path}").status_code < 500
    assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}
