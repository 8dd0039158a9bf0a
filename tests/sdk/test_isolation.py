"""What one tenant does is nothing to another, and what is sent twice or in disorder is done once and in order."""

import threading

import httpx
import numpy as np
import pytest
import tinker
from server import MODEL_NAME, Server
from tinker import types
from work import DEADLINE_S, REFUSED, adam, datum, logprobs, random_tokens, step, train_client

from conftest import Clients

HEADERS = {"X-API-Key": "tml-raw"}


def trace(service: tinker.ServiceClient, data: list[types.Datum], disturb) -> list[np.ndarray]:
    """Log-probabilities along five steps with decay, while `disturb(i)` happens between them."""
    client = train_client(service)
    found = []
    for i in range(5):
        disturb(i)
        step(client, data, weight_decay=0.1)
        found.extend(logprobs(client, data))
    return found


def test_others_leave_a_tenant_bit_identical(connect: Clients) -> None:
    """Their steps, decay, malformed data, deletes and unloads; one after the other, so that the batches are the same."""
    data = [datum(random_tokens(np.random.default_rng(0), 20)) for _ in range(2)]
    alone = trace(connect("alice"), data, lambda _i: None)
    noisy = connect("mallory")
    others = [train_client(noisy) for _ in range(3)]
    noise = [datum(random_tokens(np.random.default_rng(9), 40))]

    def disturb(i: int) -> None:
        for other in others:
            step(other, noise, lr=0.5, weight_decay=0.9)
        path = others[0].save_state(f"noise-{i}").result(DEADLINE_S).path
        noisy.create_rest_client().delete_checkpoint_from_tinker_path(path).result(DEADLINE_S)
        for bad in (datum([5, 10**6]), datum([5, 6], weights=[float("nan")]), datum([5, 6], nonsense=[1.0])):
            with pytest.raises(REFUSED):
                others[1].forward_backward([bad], "cross_entropy").result(DEADLINE_S)
        others[2].optim_step(adam(1.0)).result(DEADLINE_S)

    for one, other in zip(alone, trace(connect("bob"), data, disturb), strict=True):
        assert np.array_equal(one, other)


def test_tenants_at_once_train_as_each_alone(connect: Clients) -> None:
    """In one pass with others, beyond the noise of floating point there is none."""
    batches = [[datum(random_tokens(np.random.default_rng(seed), 30)) for _ in range(3)] for seed in range(4)]
    service = connect()
    alone = [[step(client, batch) for _ in range(4)] for client, batch in ((train_client(service), batch) for batch in batches)]
    together: list[list[float]] = [[] for _ in batches]

    def work(i: int) -> None:
        client = train_client(connect(f"tenant-{i}"))
        together[i] = [step(client, batches[i]) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(together, alone, rtol=1e-4)


def test_pipelined_calls_are_done_in_order(connect: Clients) -> None:
    data = [datum(random_tokens(np.random.default_rng(1), 20))]
    service = connect()
    waited, pipelined = train_client(service), train_client(service)
    expected = [step(waited, data) for _ in range(6)]
    futures = [(pipelined.forward_backward(data, "cross_entropy"), pipelined.optim_step(adam())) for _ in range(6)]
    assert [passed.result(DEADLINE_S).metrics["loss:sum"] for passed, _ in futures] == expected


class Raw:
    """The protocol by hand, for what no SDK does on purpose."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, headers=HEADERS, timeout=40)
        self.session = self.post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0", type="create_session")["session_id"]
        created = self.post(
            "create_model", session_id=self.session, model_seq_id=0, base_model=MODEL_NAME, lora_config={"rank": 4, "seed": 3},
            type="create_model")
        self.model = self.wait(created["request_id"])["model_id"]

    def post(self, endpoint: str, **body: object) -> dict:
        answer = self.http.post(f"/api/v1/{endpoint}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait(self, request_id: str) -> dict:
        while True:
            answer = self.http.post("/api/v1/retrieve_future", json={"request_id": request_id, "allow_metadata_only": False})
            if answer.status_code == 408:
                continue
            assert answer.status_code == 200, answer.text
            found = answer.json()
            if found.get("type") != "try_again":
                return found

    def optim(self, seq_id: int, lr: float = 1e-2) -> str:
        return self.post("optim_step", model_id=self.model, seq_id=seq_id, adam_params={"learning_rate": lr})["request_id"]

    def save(self, seq_id: int, name: str) -> str:
        return self.post("save_weights", model_id=self.model, seq_id=seq_id, path=name, type="save_weights")["request_id"]


def test_requests_out_of_order_are_done_in_order_and_resent_ones_once(server: Server) -> None:
    raw = Raw(server.url)
    third = raw.save(3, "late")  # arrives first
    second = raw.optim(2)
    first = raw.save(1, "early")
    assert raw.save(1, "early") == first
    assert raw.optim(2) == second
    assert raw.save(3, "late") == third
    answers = [raw.wait(request) for request in (first, second, third)]
    assert [each.get("path", "").rpartition("/")[2] for each in answers] == ["early", "", "late"]
    assert raw.wait(first) == answers[0], "an answer can be fetched again"
    listed = raw.http.get(f"/api/v1/training_runs/{raw.model}/checkpoints").json()["checkpoints"]
    assert sorted(each["checkpoint_id"] for each in listed) == ["weights/early", "weights/late"]


def test_a_refused_request_holds_nobody_up(server: Server) -> None:
    raw = Raw(server.url)
    refused = raw.http.post("/api/v1/optim_step", json={
        "model_id": raw.model, "seq_id": 1, "adam_params": {"learning_rate": "fast"}, "type": "optim_step"})
    assert 400 <= refused.status_code < 500
    assert "learning_rate" in refused.text
    assert raw.wait(raw.save(2, "after"))["path"].endswith("/after")


def test_a_gap_is_given_up(server: Server) -> None:
    raw = Raw(server.url)
    assert raw.wait(raw.save(5, "alone"))["path"].endswith("/alone")
