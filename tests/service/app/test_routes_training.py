"""Models over HTTP: what is asked for is done once, in order, and refused in one sentence."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from http_serving import Client, Serve
from protocol import PROTOBUF, datum, finished, model_of, pass_body, session_of

TOKENS = [13, 14, 15, 9, 8, 7]


def test_a_model_learns_saves_and_goes_on_in_a_new_session(serve: Serve) -> None:
    async def body(client: Client) -> None:
        model = await model_of(client, await session_of(client))
        info = (await client.post("get_info", {"model_id": model})).json
        assert info["model_data"] == {"model_name": "org/small", "tokenizer_id": "folder"} and info["lora_rank"] == 4
        losses = []
        for step in range(3):
            seq = 2 * step + 1
            done = await finished(
                client, await client.post("forward_backward", pass_body(model, seq, [datum(TOKENS)] * 2), headers=PROTOBUF))
            losses.append(done["metrics"]["loss:sum"])
            step_body = {"model_id": model, "seq_id": seq + 1, "adam_params": {"learning_rate": 0.01}}
            assert (await finished(client, await client.post("optim_step", step_body)))["metrics"]["grad_norm"] > 0
        assert losses[0] > losses[1] > losses[2]
        (record,) = done["loss_fn_outputs"]
        assert record["num_datums"] == 2 and -np.frombuffer(record["fields"]["logprobs"]["data"], "<f4").sum() == pytest.approx(losses[2])
        saved = await finished(client, await client.post("save_weights", {"model_id": model, "seq_id": 7, "path": "one"}))
        assert saved["path"] == f"tinker://{model}/weights/one"
        session = await session_of(client)
        loaded = await finished(client, await client.post("load_weights", {
            "session_id": session, "model_seq_id": 0, "path": saved["path"], "optimizer": True}))
        assert loaded["model_id"] == f"{session}:train:0"
        passes = [await finished(client, await client.post(
            "forward_backward", pass_body(name, seq, [datum(TOKENS)], forward_only=True), headers=PROTOBUF))
            for name, seq in ((model, 8), (loaded["model_id"], 1))]
        assert passes[0]["metrics"]["loss:sum"] == pytest.approx(passes[1]["metrics"]["loss:sum"], abs=1e-5)

    serve(body)


def test_requests_run_in_their_order_and_once_however_they_arrive(serve: Serve) -> None:
    async def body(client: Client) -> None:
        model = await model_of(client, await session_of(client))
        forward = pass_body(model, 1, [datum(TOKENS)])
        step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
        after = pass_body(model, 3, [datum(TOKENS)], forward_only=True)
        late = [await client.post("forward_backward", after, headers=PROTOBUF), await client.post("optim_step", step)]
        first = [await client.post("forward_backward", forward, headers=PROTOBUF) for _ in range(3)]
        assert {ack.json["request_id"] for ack in first} == {f"{model}:1"}
        results = await asyncio.gather(*(finished(client, ack) for ack in [*first, *late]))
        assert results[0] == results[1] == results[2] and results[3]["metrics"]["loss:sum"] < results[0]["metrics"]["loss:sum"]
        assert (await client.post("optim_step", step)).json["request_id"] == f"{model}:2", "sent again after it has ended"
        again = pass_body(model, 4, [datum(TOKENS)], forward_only=True)
        same = await finished(client, await client.post("forward_backward", again, headers=PROTOBUF))
        assert same["metrics"]["loss:sum"] == pytest.approx(results[3]["metrics"]["loss:sum"], abs=1e-6)

    serve(body)


def test_refused_requests_leave_no_gap_that_others_wait_for(serve_with: Callable[..., None]) -> None:
    async def body(client: Client) -> None:
        model = await model_of(client, await session_of(client))
        good = {"model_id": model, "seq_id": 7, "adam_params": {}}
        last = await client.post("optim_step", good)
        wrong = [
            await client.post("forward_backward", pass_body(model, 1, [datum(TOKENS)], loss="nonsense"), headers=PROTOBUF),
            await client.post("forward_backward", pass_body(model, 2, [datum([99, 98, 97])]), headers=PROTOBUF),
            await client.post("optim_step", {"model_id": model, "seq_id": 3, "optimizer_params": {"type": "dimuon"}}),
            await client.post("save_weights", {"model_id": model, "seq_id": 4, "ttl_seconds": -1}),
            await client.post("save_weights", {"model_id": model, "seq_id": 5, "path": "../../etc"}),
            await client.post("load_weights", {"model_id": model, "seq_id": 6, "path": "nowhere", "optimizer": True})]
        assert [refused.status for refused in wrong] == [422] * 6 and all(refused.detail.count("\n") == 0 for refused in wrong)
        async with asyncio.timeout(60):  # a gap would be waited for longer
            assert "metrics" in await finished(client, last)

    serve_with(body, gap_patience_s=1000)


def test_what_belongs_to_another_or_does_not_exist_is_not_there(serve: Serve) -> None:
    async def body(client: Client) -> None:
        session, bob = await session_of(client), client.of("tml-bob")
        model = await model_of(client, session)
        absent = model.replace(":0", ":7")
        for asked, name in ((bob, model), (client, absent)):
            requests = {
                "get_info": {"model_id": name}, "optim_step": {"model_id": name, "seq_id": 1, "adam_params": {}},
                "save_weights_external": {"model_id": name, "seq_id": 1, "path": "out"},
                "retrieve_future": {"request_id": f"{model}:create" if asked is bob else "no-such-thing"}}
            for path, content in requests.items():
                assert (await asked.post(path, content)).status == 404, path
            assert (await asked.post("forward_backward", pass_body(name, 1, [datum(TOKENS)]), headers=PROTOBUF)).status == 404
        other = await client.post("create_model", {
            "session_id": session, "model_seq_id": 1, "base_model": "meta/other", "lora_config": {"rank": 4}})
        failed = await finished(client, other)
        assert failed["category"] == "user" and "meta/other" in failed["error"] and "org/small" in failed["error"]
        big = await client.post("create_model", {
            "session_id": session, "model_seq_id": 2, "base_model": "org/small", "lora_config": {"rank": 4096}})
        assert (await finished(client, big))["category"] == "user"

    serve(body)


def test_bodies_that_are_no_protobuf_or_too_large_are_told_so(serve: Serve) -> None:
    async def body(client: Client) -> None:
        older = await client.post("forward", {"forward_input": {}})
        assert older.status == 404 and "update the tinker SDK to 0.26 or later" in older.detail
        model = await model_of(client, await session_of(client))
        old = await client.post("forward_backward", {"model_id": model, "seq_id": 1})
        assert old.status == 422 and "update the tinker SDK" in old.detail
        for content in (b"\xff" * 40, b"", pass_body(model, 1, [datum(TOKENS)])[:-3]):
            refused = await client.post("forward_backward", content, headers=PROTOBUF)
            assert refused.status == 422 and refused.detail
        large = await client.post("forward_backward", bytes(2**20 + 1), headers=PROTOBUF)
        assert large.status == 413 and "serve.max_body_bytes" in large.detail

    serve(body)
