"""What clients ask first, and sessions."""

from http_serving import Client, Serve
from protocol import model_of, session_of


def test_a_client_learns_how_to_speak_and_what_there_is(serve: Serve) -> None:
    async def body(client: Client) -> None:
        config = (await client.post("client/config", {"sdk_version": "0.38.0"})).json
        assert config["parallel_fwdbwd_chunks"] is False and config["fwdbwd_max_chunk_bytes_count"] > 5_000_000
        assert (await client.post("client/dynamic_config", {"sdk_version": "0.38.0"})).json["sample_cancel_enabled"] is False
        (model,) = (await client.get("get_server_capabilities")).json["supported_models"]
        assert model == {"model_name": "org/small", "max_context_length": 64, "trainable": True, "sampleable": True}
        assert (await client.post("telemetry", {"events": []})).json == {"status": "accepted"}
        assert (await client.of("").post("client/config", {})).status == 401
        assert (await client.of("").get("healthz")).json == {"status": "ok"}

    serve(body)


def test_a_session_lives_until_it_is_finished_and_belongs_to_its_owner(serve: Serve) -> None:
    async def body(client: Client) -> None:
        session, bob = await session_of(client), client.of("tml-bob")
        assert (await client.post("session_heartbeat", {"session_id": session})).json == {"type": "session_heartbeat"}
        run = await model_of(client, session)
        finish = {"reason": {"type": "success"}, "detail": None}
        for path, content in (("session_heartbeat", {"session_id": session}), (f"sessions/{session}/finish", finish)):
            stranger = await bob.post(path, content)
            assert stranger.status == 404 and "there is no session" in stranger.detail
        assert (await client.get(f"sessions/{session}")).json["training_run_ids"] == [run]
        ended = await client.post(f"sessions/{session}/finish", finish)
        assert (ended.status, ended.body) == (204, b"")
        assert (await client.post(f"sessions/{session}/finish", finish)).status == 204, "twice is no error"
        assert (await client.post("session_heartbeat", {"session_id": session})).status == 410

    serve(body)


def test_wrong_bodies_are_one_sentence(serve: Serve) -> None:
    async def body(client: Client) -> None:
        for content, sentence in (
                (b"{", "the body is not JSON"), (b"", "the body is empty"), (b'{"session_id": 7}', "session_id must be a string")):
            refused = await client.post("session_heartbeat", content)
            assert refused.status == 422 and sentence in refused.detail

    serve(body)
