"""What one owner can make the server hold: known before it is there, bounded, and on that owner's account."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from http_serving import Client
from protocol import PROTOBUF, base_sampler, datum, finished, model_of, pass_body, sample_body, session_of
from sdk.server import MODEL_NAME, Server
from support.probing import Probe, run_probe

MALLORY, ALICE = "tml-mallory", "tml-alice"


@pytest.fixture(scope="module")
def tight(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server where nobody may have much."""
    options = {"max_sessions": 4, "max_samplers": 3, "max_queued_bytes": 400_000, "max_resident_models": 2}
    flags = [part for name, value in options.items() for part in (f"--serve.{name}", str(value))]
    with Server(served_model, tmp_path_factory.mktemp("tight"), *flags) as running:
        yield running


def wide(length: int, width: int) -> dict[str, Any]:
    """A datum of a few hundred bytes with so many targets at each position, of which one is listed."""
    crow = np.ones(length + 1, "<i8")
    crow[0] = 0
    sparse = {"values": np.array([5], "<i8").tobytes(), "crow_indices": crow.tobytes(), "col_indices": bytes(8)}
    return datum([5] * (length + 1)) | {
        "loss_fn_inputs": {"target_tokens": {"sparse_csr": sparse, "dtype": 2, "shape": [length, width]}}}


async def disk_of(client: Client, model: str) -> int:
    """Bytes on the account of a model's owner."""
    status = (await client.ask("GET", "/status.json")).json["status"]
    owner = next(row["owner"] for row in status["models"] if row["model_id"] == model)
    return next(row["disk_bytes"] for row in status["owners"] if row["owner"] == owner)


async def passed(client: Client, model: str, seq: int, data: list[dict[str, Any]], *, forward_only: bool = True) -> Any:
    """What a pass came to."""
    body = pass_body(model, seq, data, forward_only=forward_only)
    return await finished(client, await client.post("forward_backward", body, headers=PROTOBUF))


def test_a_small_body_cannot_ask_for_millions_of_targets(probe: Probe) -> None:
    async def body(client: Client) -> None:
        mallory = client.of(MALLORY)
        model = await model_of(mallory, await session_of(mallory), base_model=MODEL_NAME)
        sent = pass_body(model, 1, [wide(1, 1 << 24)], forward_only=True)
        refused = await mallory.post("forward_backward", sent, headers=PROTOBUF)
        assert len(sent) < 300 and refused.status == 422 and "[N, K] with K up to 1024" in refused.detail
        sampler = await base_sampler(mallory, base_model=MODEL_NAME)
        targets = {"data": [5], "dtype": "int64", "shape": [1, 1 << 24], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]}
        refused = await mallory.post("asample", sample_body(sampler, 1, [5, 6], max_tokens=1) | {"target_prompt_logprobs": targets})
        assert refused.status == 422 and "[N, K] with K up to 1024" in refused.detail

    probe(body)


def test_answers_are_on_their_owners_account(probe: Probe) -> None:
    async def body(client: Client) -> None:
        mallory = client.of(MALLORY)
        model = await model_of(mallory, await session_of(mallory), base_model=MODEL_NAME)
        before = await disk_of(client, model)
        await passed(mallory, model, 1, [wide(1, 1024)] * 100)
        assert await disk_of(client, model) - before >= 4 * 1024 * 100

    probe(body)


def test_memory_that_a_request_may_take_is_refused_before_it_is_there(tight: Server) -> None:
    async def body(client: Client) -> None:
        mallory, alice = client.of(MALLORY), client.of(ALICE)
        model = await model_of(mallory, await session_of(mallory), base_model=MODEL_NAME)
        refused = await mallory.post("forward_backward", pass_body(model, 1, [wide(10, 1024)] * 10), headers=PROTOBUF)
        assert refused.status == 413 and "bytes of memory, but you may have at most 400000 under way" in refused.detail
        sampler = await base_sampler(mallory, base_model=MODEL_NAME)
        refused = await mallory.post("asample", sample_body(sampler, 1, [5], max_tokens=200) | {"topk_sample_logprobs": 256})
        assert refused.status == 413 and "ask for fewer likeliest tokens" in refused.detail
        # What was refused is not waited for, and nobody else hears of it.
        assert "loss:sum" in str((await passed(mallory, model, 2, [datum([5, 6, 7])]))["metrics"])
        own = await model_of(alice, await session_of(alice), base_model=MODEL_NAME)
        assert "loss:sum" in str((await passed(alice, own, 1, [datum([5, 6, 7])]))["metrics"])

    run_probe(tight, body)


def test_many_likely_tokens_of_many_samples_cost_what_they_take(probe: Probe) -> None:
    async def body(client: Client) -> None:
        mallory = client.of(MALLORY)
        sampler = await base_sampler(mallory, base_model=MODEL_NAME)
        large = sample_body(sampler, 1, [5], num_samples=4096, max_tokens=250) | {"topk_sample_logprobs": 256}
        refused = await mallory.post("asample", large)
        assert refused.status == 413 and "costs 65536000 tokens" in refused.detail

    probe(body)


def test_sessions_and_samplers_of_an_owner_are_bounded_and_others_have_theirs(tight: Server) -> None:
    async def body(client: Client) -> None:
        carol = client.of("tml-carol")
        sessions = [await session_of(carol) for _ in range(4)]
        refused = await carol.post("create_session", {"tags": [], "sdk_version": "0.38.0"})
        assert refused.status == 400 and "you have 4 of 4 sessions" in refused.detail
        answers = [
            await carol.post("create_sampling_session", {"session_id": sessions[0], "sampling_session_seq_id": i, "base_model": MODEL_NAME})
            for i in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 200, 400] and "you have 3 of 3 samplers" in answers[3].detail
        assert await session_of(client.of("tml-dave"))

    run_probe(tight, body)


def test_more_models_than_there_is_room_for_are_as_they_were_when_they_come_back(tight: Server) -> None:
    async def body(client: Client) -> None:
        erin, frank = client.of("tml-erin"), client.of("tml-frank")
        own = await model_of(erin, await session_of(erin), base_model=MODEL_NAME)
        await passed(erin, own, 1, [datum([5, 6, 7, 8])], forward_only=False)
        await finished(erin, await erin.post("optim_step", {"model_id": own, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}))
        before = (await passed(erin, own, 3, [datum([5, 6, 7, 8])]))["metrics"]
        session = await session_of(frank)
        for seq in range(4):
            model = await model_of(frank, session, seq=seq, base_model=MODEL_NAME)
            await passed(frank, model, 1, [datum([5, 6])])
            models = (await client.ask("GET", "/status.json")).json["status"]["models"]
            assert sum(row["resident"] for row in models) <= 2
        assert not next(row["resident"] for row in models if row["model_id"] == own), "it was idle for longest"
        assert (await passed(erin, own, 4, [datum([5, 6, 7, 8])]))["metrics"] == before

    run_probe(tight, body)


def test_a_rank_is_as_small_after_a_large_pass_as_before(probe: Probe, server: Server) -> None:
    async def body(client: Client) -> None:
        mallory = client.of(MALLORY)
        model = await model_of(mallory, await session_of(mallory), base_model=MODEL_NAME)
        dense = {"dense": np.full((200, 512), 5, "<i8").tobytes(), "dtype": 2, "shape": [200, 512]}
        await passed(mallory, model, 1, [datum([5, 6])])
        rank = next(child for child in server.children() if "rank 0" in " ".join(child.cmdline()))
        before = rank.memory_info().rss
        data = [datum([5] * 201) | {"loss_fn_inputs": {"target_tokens": dense}}] * 16
        await passed(mallory, model, 2, data, forward_only=False)
        await passed(mallory, model, 3, [datum([5, 6])])
        assert rank.memory_info().rss - before < 300 << 20, f"{rank.memory_info().rss - before} bytes more, of {1600 << 10} targets"

    probe(body)
