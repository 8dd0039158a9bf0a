"""Samplers and futures over HTTP, on a real engine."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from http_serving import Answer, Client, Serve
from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from offbeat.errors import StorageError
from protocol import PROTOBUF, datum, finished, model_of, pass_body, sample_body, session_of
from small_run import build_small_model

ServeWith = Callable[..., None]

PROMPT = [13, 14, 15, 9]


async def base_sampler(client: Client) -> str:
    session = await session_of(client)
    made = await client.post("create_sampling_session", {
        "session_id": session, "sampling_session_seq_id": 0, "base_model": "org/small"})
    return made.json["sampling_session_id"]


def tokens_of(result: dict[str, Any]) -> list[list[int]]:
    return [np.frombuffer(sequence["tokens"], "<i4").tolist() for sequence in result["sequences"]]


def logprobs_of(result: dict[str, Any]) -> list[np.ndarray]:
    return [np.frombuffer(sequence["logprobs"], "<f4") for sequence in result["sequences"]]


def test_samples_are_greedy_seeded_and_stopped_as_asked(serve: Serve) -> None:
    async def body(client: Client) -> None:
        sampler = await base_sampler(client)
        seqs = iter(range(100))

        async def sample(**params: Any) -> dict[str, Any]:
            ack = await client.post("asample", sample_body(sampler, next(seqs), PROMPT, num_samples=4, **params))
            assert ack.json["sample_sequence_ids"] == [f"{ack.json['request_id']}:{i}" for i in range(4)]
            return await finished(client, ack)

        greedy = await sample(max_tokens=5, temperature=0, stop=[])
        assert len({tuple(tokens) for tokens in tokens_of(greedy)}) == 1
        seeded = tokens_of(await sample(max_tokens=8, seed=7, stop=[]))
        assert len({tuple(tokens) for tokens in seeded}) == 4 and seeded == tokens_of(await sample(max_tokens=8, seed=7, stop=[]))
        assert seeded != tokens_of(await sample(max_tokens=8, seed=8, stop=[]))
        third = tokens_of(greedy)[0][2]
        stopped = await sample(max_tokens=5, temperature=0, stop=[third])
        cut = tokens_of(greedy)[0][: tokens_of(greedy)[0].index(third) + 1]
        assert tokens_of(stopped) == [cut] * 4 and all(s.get("stop_reason", 0) == 0 for s in stopped["sequences"])
        whole = await sample(stop=[])
        assert {len(tokens) for tokens in tokens_of(whole)} == {64 - len(PROMPT)}
        assert all(s["stop_reason"] == 1 for s in whole["sequences"])

    serve(body)


def test_a_database_out_of_reach_is_not_asked_again_at_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def out_of_reach(*_: Any, **__: Any) -> None:
        raise StorageError("the database is out of reach")

    monkeypatch.setattr("offbeat.service.futures.Futures.retrieve", out_of_reach)
    monkeypatch.setattr("offbeat.service.app.routes_sampling._PAUSE_S", 0.3)

    async def body(client: Client) -> None:
        start = time.monotonic()
        answer = await client.post("retrieve_future", {"request_id": "any"})
        assert answer.status == 503 and time.monotonic() - start >= 0.3

    serve(body)


def test_logprobs_are_those_of_the_scaled_distribution_and_prompts_are_scored(serve: Serve) -> None:
    async def body(client: Client) -> None:
        sampler = await base_sampler(client)
        hot = sample_body(sampler, 0, PROMPT, max_tokens=1, temperature=2.0, top_k=3, seed=1)
        result = await finished(client, await client.post("asample", hot | {"topk_sample_logprobs": 54}))
        (token,), (logprob,) = tokens_of(result)[0], logprobs_of(result)[0]
        top = result["sequences"][0]["topk_sampled_logprobs"]
        ids, scaled = np.frombuffer(top["token_ids"], "<i4"), np.frombuffer(top["logprobs"], "<f4")
        plain = {"prompt_logprobs": True, "topk_prompt_logprobs": 54, "num_samples": 1}
        asked = sample_body(sampler, 1, [*PROMPT, token], max_tokens=1) | plain
        scored = await finished(client, await client.post("asample", asked))
        logprobs = np.frombuffer(scored["prompt_logprobs"], "<f4")
        rows = np.frombuffer(scored["topk_prompt_logprobs"]["logprobs"], "<f4").reshape(5, 54)
        names = np.frombuffer(scored["topk_prompt_logprobs"]["token_ids"], "<i4").reshape(5, 54)
        assert np.isnan(logprobs[0]) and (rows[0] == -99999.0).all() and np.isfinite(logprobs[1:]).all()
        full = np.zeros(54)
        full[names[4]] = rows[4]
        expected = full / 2 - np.log(np.exp(full / 2).sum())
        assert logprob == pytest.approx(expected[token], abs=1e-4) and logprobs[4] == pytest.approx(full[token], abs=1e-4)
        np.testing.assert_allclose(scaled, expected[ids], atol=1e-4)

    serve(body)


def test_a_sampler_never_drifts_and_a_deleted_checkpoint_says_so(serve: Serve) -> None:
    async def body(client: Client) -> None:
        session = await session_of(client)
        model = await model_of(client, session)

        async def train(seq: int) -> None:
            await client.post("forward_backward", pass_body(model, seq, [datum(PROMPT)]), headers=PROTOBUF)
            await finished(client, await client.post("optim_step", {
                "model_id": model, "seq_id": seq + 1, "adam_params": {"learning_rate": 0.1}}))

        async def score(sampler: str, seq: int) -> list[float]:
            asked = sample_body(sampler, seq, PROMPT, max_tokens=1) | {"prompt_logprobs": True}
            result = await finished(client, await client.post("asample", asked))
            assert "prompt_logprobs" in result, result
            return np.frombuffer(result["prompt_logprobs"], "<f4")[1:].tolist()

        await train(1)
        saved = await finished(client, await client.post("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "one"}))
        made = await finished(client, await client.post("save_weights_for_sampler", {
            "model_id": model, "seq_id": 4, "sampling_session_seq_id": 0}))
        snapshot = made["sampling_session_id"]
        named = (await client.post("create_sampling_session", {
            "session_id": session, "sampling_session_seq_id": 1, "model_path": saved["path"]})).json["sampling_session_id"]
        assert (snapshot, named) == (f"{session}:sample:0", f"{session}:sample:1")
        assert (await client.get(f"samplers/{named}")).json == {
            "sampler_id": named, "base_model": "org/small", "model_path": saved["path"]}
        before = await score(snapshot, 0)
        assert before == pytest.approx(await score(named, 0), abs=1e-5)
        await train(5)
        assert (await score(snapshot, 1), await score(named, 1)) == (pytest.approx(before, abs=1e-5),) * 2
        for path in (f"samplers/{named}",):
            assert (await client.of("tml-bob").get(path)).status == 404
        assert (await client.of("tml-bob").post("asample", sample_body(named, 9, PROMPT))).status == 404
        run = f"training_runs/{model}/checkpoints/sampler_weights/one"
        assert (await client.ask("DELETE", f"/api/v1/{run}")).status == 204
        gone = await finished(client, await client.post("asample", sample_body(named, 2, PROMPT, max_tokens=1)))
        assert gone["category"] == "user" and "was deleted" in gone["error"]

    serve(body)


def test_alternatives_to_the_tokens_of_a_prompt_are_drawn_by_the_model(serve: Serve) -> None:
    async def body(client: Client) -> None:
        sampler = await base_sampler(client)

        async def drawn(seq: int, **params: Any) -> dict[str, np.ndarray]:
            asked = sample_body(sampler, seq, PROMPT, max_tokens=1, **params) | {"prompt_alt_tokens_k": 6}
            found = (await finished(client, await client.post("asample", asked)))["prompt_alt_tokens"]
            assert found["tokens"]["shape"] == found["logprobs"]["shape"] == [3, 6]
            return {"tokens": np.frombuffer(found["tokens"]["dense"], "<i8"), "logprobs": np.frombuffer(found["logprobs"]["dense"], "<f4")}

        first, again, greedy = await drawn(0, seed=3), await drawn(1, seed=3), await drawn(2, temperature=0)
        assert first["tokens"].tolist() == again["tokens"].tolist() and len(set(first["tokens"].tolist())) > 3
        assert (first["logprobs"] < 0).all() and all(len(set(row)) == 1 for row in greedy["tokens"].reshape(3, 6).tolist())

    serve(body)


def test_a_poll_waits_and_says_why_nothing_moves(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.service.app.routes_sampling._POLL_S", 0.05)

    async def body(client: Client) -> None:
        model = await model_of(client, await session_of(client))
        early = await client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
        waiting = await client.post("retrieve_future", {"request_id": early.json["request_id"]})
        assert waiting.status == 408 and waiting.json["request_id"] == f"{model}:2" and waiting.json["queue_state"]
        await client.post("forward_backward", pass_body(model, 1, [datum(PROMPT)]), headers=PROTOBUF)
        async with asyncio.timeout(60):
            assert "metrics" in await finished(client, early)

    serve(body)


def test_bad_requests_for_samples_are_one_sentence(serve: Serve) -> None:
    async def body(client: Client) -> None:
        sampler = await base_sampler(client)
        for change in ({"prompt": {"chunks": []}}, {"num_samples": 0}, {"sampling_params": {"temperature": -1}},
                       {"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}},
                       {"sampling_params": {"stop": ["a", 1]}}, {"seq_id": -1}, {"prompt": {"chunks": [{"tokens": [99]}]}}):
            refused = await client.post("asample", sample_body(sampler, 0, PROMPT) | change)
            assert refused.status == 422 and refused.detail and "\n" not in refused.detail, change
        full = await finished(client, await client.post("asample", sample_body(sampler, 0, [13] * 64)))
        assert full["category"] == "user" and "no room" in full["error"]

    serve(body)


def test_a_teacher_of_another_size_is_sampled_and_scored_but_not_trained(serve_with: ServeWith, tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        models = (await client.get("get_server_capabilities")).json["supported_models"]
        assert [(m["model_name"], m["max_context_length"], m["trainable"]) for m in models] == [
            ("org/small", 64, True), ("meta/other", 64, True), ("org/teacher", 40, False)]
        session = await session_of(client)

        async def sampler_of(number: int, base_model: str) -> Answer:
            return await client.post("create_sampling_session", {
                "session_id": session, "sampling_session_seq_id": number, "base_model": base_model})

        teacher, student = [(await sampler_of(i, name)).json["sampling_session_id"] for i, name in enumerate(("org/teacher", "meta/other"))]
        found = {}
        for sampler in (teacher, student):
            ack = await client.post("asample", sample_body(sampler, 0, PROMPT, temperature=0, stop=[]) | {"prompt_logprobs": True})
            found[sampler] = await finished(client, ack)
        assert [len(tokens_of(found[sampler])[0]) for sampler in (teacher, student)] == [40 - len(PROMPT), 64 - len(PROMPT)]
        theirs, ours = (np.frombuffer(found[sampler]["prompt_logprobs"], "<f4")[1:] for sampler in (teacher, student))
        assert np.isfinite(theirs).all() and np.abs(theirs - ours).max() > 0.01, "two models"
        assert (await client.get(f"samplers/{teacher}")).json["base_model"] == "org/teacher"
        assert (await client.get(f"samplers/{student}")).json["base_model"] == "org/small"
        beyond = await finished(client, await client.post("asample", sample_body(teacher, 1, [5000, 6000], max_tokens=2)))
        assert beyond["category"] == "user" and "vocabulary" in beyond["error"]
        long = await client.post("asample", sample_body(teacher, 2, [7] * 41, max_tokens=2))
        assert long.status == 422 and "1 to 40 tokens, got 41" in long.detail
        assert (await sampler_of(0, "org/small")).status == 422, "a number is one sampler's"
        unknown = await sampler_of(3, "nobody/nothing")
        assert unknown.status == 422 and "only 'org/small', 'meta/other', 'org/teacher'" in unknown.detail
        lora = {"session_id": session, "lora_config": {"rank": 4, "seed": 1}}
        refused = await finished(client, await client.post("create_model", lora | {"model_seq_id": 0, "base_model": "org/teacher"}))
        assert refused["category"] == "user" and "can only be sampled on this server; train 'org/small'" in refused["error"]
        model = await model_of(client, session, seq=1, base_model="meta/other")
        info = (await client.post("get_info", {"model_id": model})).json
        assert info["model_data"] == {"model_name": "org/small", "tokenizer_id": "folder"}
        chat = await client.ask("POST", "/v1/chat/completions", {"model": "org/teacher", "messages": [{"role": "user", "content": "1"}]})
        assert chat.status == 400 and "its tokenizer is not known" in chat.json["error"]["message"]
        status = (await client.ask("GET", "/status.json")).json["status"]
        assert [engine["name"] for engine in status["engines"]] == ["engine 0", "org/teacher 0"]

    server = EngineServer(EngineOptions(model=build_small_model(tmp_path / "teacher", seed=5), max_context=40))
    try:
        serve_with(body, aliases=("meta/other",), sampling_models=(f"org/teacher={server.start()}",))
    finally:
        server.stop()
