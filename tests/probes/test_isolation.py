"""What belongs to another owner is answered like what does not exist."""

from http_serving import Client
from protocol import PROTOBUF, datum, finished, model_of, pass_body, sample_body, session_of
from sdk.server import MODEL_NAME
from support.probing import Probe


def test_a_neighbour_cannot_train_save_or_look_at_a_model(probe: Probe) -> None:
    async def body(alice: Client) -> None:
        mallory = alice.of("tml-mallory")
        model = await model_of(alice, await session_of(alice), base_model=MODEL_NAME)
        step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 1.0}}
        refusals = [
            await mallory.post("forward_backward", pass_body(model, 1, [datum([5, 6, 7])]), headers=PROTOBUF),
            await mallory.post("optim_step", step),
            await mallory.post("save_weights", {"model_id": model, "seq_id": 1, "path": "mine"}),
            await mallory.post("get_info", {"model_id": model})]
        nothing = await mallory.post("get_info", {"model_id": model.replace(model[:8], "0" * 8)})
        assert {answer.status for answer in refusals} == {nothing.status} == {404}
        # Nothing of it took a number of the model's order.
        stepped = await finished(alice, await alice.post("forward_backward", pass_body(model, 1, [datum([5, 6, 7])]), headers=PROTOBUF))
        assert "loss:sum" in str(stepped["metrics"])

    probe(body)


def test_a_neighbour_finds_no_session_run_checkpoint_sampler_or_answer(probe: Probe) -> None:
    async def body(alice: Client) -> None:
        mallory, session = alice.of("tml-mallory"), await session_of(alice)
        model = await model_of(alice, session, base_model=MODEL_NAME)
        saving = await alice.post("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "mine"})
        saved = await finished(alice, saving)
        sampler = (await alice.post("create_sampling_session", {
            "session_id": session, "sampling_session_seq_id": 0, "model_path": saved["path"]})).json["sampling_session_id"]
        own, checkpoint = await session_of(mallory), f"training_runs/{model}/checkpoints/sampler_weights/mine"
        refusals = [
            await mallory.get(f"sessions/{session}"), await mallory.get(f"training_runs/{model}"), await mallory.get(f"samplers/{sampler}"),
            await mallory.post("session_heartbeat", {"session_id": session}),
            await mallory.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}),
            await mallory.post("create_model", {
                "session_id": session, "model_seq_id": 7, "base_model": MODEL_NAME, "lora_config": {"rank": 4}}),
            await mallory.post("retrieve_future", {"request_id": saving.json["request_id"]}),
            await mallory.post("asample", sample_body(sampler, 0, [5, 6], max_tokens=1)),
            await mallory.post("create_sampling_session", {
                "session_id": own, "sampling_session_seq_id": 0, "model_path": saved["path"]}),
            await mallory.post("weights_info", {"tinker_path": saved["path"]}),
            await mallory.post("copy_weights", {"source_path": saved["path"], "session_id": own, "model_seq_id": 0}),
            await mallory.ask("DELETE", f"/api/v1/{checkpoint}"), await mallory.post(f"{checkpoint}/publish"),
            await mallory.ask("PUT", f"/api/v1/{checkpoint}/ttl", {"ttl_seconds": 3600}),
            await mallory.get(f"{checkpoint}/external_weights_urls")]
        counted = {"messages": [{"role": "user", "content": "1"}]}
        chat = counted | {"max_tokens": 1}
        refusals += [
            await mallory.ask("POST", f"/v1/{api}", body | {"model": model}) for model in (saved["path"], sampler)
            for api, body in (
                ("chat/completions", chat), ("completions", {"prompt": "1"}), ("responses", {"input": "1"}), ("messages", chat),
                ("messages/count_tokens", counted))]
        assert [answer.status for answer in refusals] == [404] * len(refusals), [answer.body for answer in refusals]
        for name in ("training_runs", "checkpoints"):
            assert (await mallory.get(name)).json[name] == []
        assert session not in (await mallory.get("sessions")).json["sessions"]
        assert saved["path"] not in (await mallory.ask("GET", "/v1/models")).body.decode()
        assert (await finished(alice, await alice.post("asample", sample_body(sampler, 0, [5, 6], max_tokens=1))))["sequences"]

    probe(body)


def test_a_model_keeps_every_bit_beside_a_neighbour_that_diverges(probe: Probe) -> None:
    score = {"forward_only": True}

    async def body(alice: Client) -> None:
        mallory = alice.of("tml-mallory")
        model = await model_of(alice, await session_of(alice), base_model=MODEL_NAME)
        other = await model_of(mallory, await session_of(mallory), base_model=MODEL_NAME)

        async def scored(seq_id: int) -> object:
            answer = await finished(
                alice, await alice.post("forward_backward", pass_body(model, seq_id, [datum([5, 6, 7, 8])], **score), headers=PROTOBUF))
            return answer["loss_fn_outputs"]

        before = await scored(1)
        for seq_id in (1, 3, 5):  # its weights are beyond all numbers after a step or two
            await mallory.post("forward_backward", pass_body(other, seq_id, [datum([9, 9, 9, 9], [1e30] * 3)]), headers=PROTOBUF)
            await finished(mallory, await mallory.post("optim_step", {
                "model_id": other, "seq_id": seq_id + 1, "adam_params": {"learning_rate": 9.0, "weight_decay": 1e30}}))
        assert await scored(2) == before

    probe(body)
