"""Runs, checkpoints and sessions over HTTP."""

from pathlib import Path

import pytest
from peft import PeftConfig
from safetensors.numpy import load

from http_serving import Client, Serve
from offbeat.service.app.routes_rest import Exports, LinkedExport, knows_external, sdk_version
from offbeat.service.errors import UnknownError
from offbeat.service.types import Caller
from protocol import finished, model_of, session_of


def test_runs_and_checkpoints_are_listed_published_and_deleted_by_their_owner(serve: Serve) -> None:
    async def body(client: Client) -> None:
        bob, session = client.of("tml-bob"), await session_of(client)
        model = await model_of(client, session)
        for seq, name in enumerate(("one", "two"), start=1):
            await finished(client, await client.post("save_weights", {"model_id": model, "seq_id": seq, "path": name, "ttl_seconds": 7200}))
        run = (await client.get(f"training_runs/{model}")).json
        assert (run["training_run_id"], run["base_model"], run["lora_rank"]) == (model, "org/small", 4)
        assert run["last_checkpoint"]["tinker_path"] == f"tinker://{model}/weights/two" and run["last_sampler_checkpoint"] is None
        page = (await client.get("training_runs?limit=1&offset=0")).json
        assert [r["training_run_id"] for r in page["training_runs"]] == [model] and page["cursor"]["total_count"] == 1
        assert (await bob.get("training_runs")).json["training_runs"] == [] and (await bob.get(f"training_runs/{model}")).status == 404
        listed = (await client.get("checkpoints?limit=1")).json
        assert len(listed["checkpoints"]) == 1 and listed["cursor"]["total_count"] == 2
        one = f"training_runs/{model}/checkpoints/weights/one"
        assert (await bob.ask("DELETE", f"/api/v1/{one}")).status == 404
        info = {"tinker_path": f"tinker://{model}/weights/one"}
        assert (await bob.post("weights_info", info)).status == 404
        assert (await client.post(f"{one}/publish")).status == 204
        assert (await bob.post("weights_info", info)).json["lora_rank"] == 4
        assert (await client.ask("DELETE", f"/api/v1/{one}/publish")).status == 204
        assert (await bob.post("weights_info", info)).status == 404
        assert (await client.ask("PUT", f"/api/v1/{one}/ttl", {"ttl_seconds": None})).status == 204
        found = (await client.get(f"training_runs/{model}/checkpoints")).json["checkpoints"]
        assert {c["checkpoint_id"]: c["expires_at"] is None for c in found} == {"weights/one": True, "weights/two": False}
        assert (await client.ask("DELETE", f"/api/v1/{one}")).status == 204
        assert (await client.ask("DELETE", f"/api/v1/{one}")).status == 404
        assert (await client.get("sessions")).json == {"sessions": [session]}
        assert (await client.get(f"sessions/{session}")).json["user_metadata"] == {"a": "b"}

    serve(body)


def test_an_export_is_fetched_by_links_that_need_no_key(serve: Serve, tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        model = await model_of(client, await session_of(client))
        saved = await finished(client, await client.post("save_weights_external", {"model_id": model, "seq_id": 1, "path": "out"}))
        path = f"training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
        assert saved["path"].endswith("external_weights/out") and (await client.of("tml-bob").get(path)).status == 404
        urls = (await client.get(path)).json["urls"]
        stranger = client.of("")
        for name, url in urls.items():
            assert url.startswith(client.url)
            (tmp_path / name).write_bytes((await stranger.ask("GET", url.removeprefix(client.url))).body)
        assert PeftConfig.from_pretrained(str(tmp_path)).r == 4  # type: ignore[attr-defined]
        assert load((tmp_path / "adapter_model.safetensors").read_bytes())
        for wrong in (urls["adapter_config.json"][:-20] + "/manifest.json", url.rpartition("/")[0] + "/../service.db",
                      f"{client.url}/api/v1/external/nothing/adapter_config.json"):
            assert (await stranger.ask("GET", wrong.removeprefix(client.url))).status == 404, wrong

    serve(body)


def test_exports_are_hidden_from_clients_that_cannot_read_them(serve: Serve) -> None:
    async def body(client: Client) -> None:
        model = await model_of(client, await session_of(client))
        for seq, name in enumerate(("save_weights", "save_weights_external"), start=1):
            await finished(client, await client.post(name, {"model_id": model, "seq_id": seq, "path": "out"}))
        for version, kinds in (("0.27.1", ["training"]), ("0.28.0", ["external", "training"])):
            for path in ("checkpoints", f"training_runs/{model}/checkpoints"):
                page = (await client.ask("GET", f"/api/v1/{path}", headers={"user-agent": f"AsyncTinker/Python {version}"})).json
                assert [checkpoint["checkpoint_type"] for checkpoint in page["checkpoints"]] == kinds
                assert page["cursor"]["total_count"] == len(kinds)

    serve(body)


def test_wrong_pages_and_paths_are_one_sentence(serve: Serve) -> None:
    async def body(client: Client) -> None:
        for path in ("training_runs?limit=-1", "checkpoints?offset=x", "sessions?limit=9999999999999", "training_runs?limit=%F0%9F%98%80"):
            refused = await client.get(path)
            assert refused.status == 422 and "must be a whole number" in refused.detail
        assert (await client.get("training_runs/nothing/checkpoints")).status in (404, 422)
        for path in ("audit", "billing/usage/events", "auth/apikey/me", "sessions/x/trace_export"):
            absent = await client.get(path)
            assert absent.status == 404 and "this server has no GET" in absent.detail

    serve(body)


ALICE, BOB = Caller("alice"), Caller("bob")


def test_links_end_with_what_they_lead_to(tmp_path: Path) -> None:
    readers = {"one": {ALICE, BOB}, "two": {ALICE}}

    def folder_of(caller: Caller, path: str) -> str:
        if caller not in readers[path]:
            raise UnknownError("there is no such export")
        return f"folder of {path}"

    exports, files = Exports(folder_of), {"a": tmp_path / "a"}
    tokens = {
        (caller, path): exports.link(LinkedExport(caller, path, f"folder of {path}", files))[0]
        for path in readers for caller in (ALICE, BOB)}
    assert [key for key, token in tokens.items() if exports.find_file(token, "a")] == [(ALICE, "one"), (BOB, "one"), (ALICE, "two")]
    assert not exports.find_file(tokens[ALICE, "one"], "b") and not exports.find_file("x", "a")
    readers["one"].remove(BOB)
    assert not exports.find_file(tokens[BOB, "one"], "a") and exports.find_file(tokens[ALICE, "one"], "a")
    exports.end_links("one")
    assert not exports.find_file(tokens[ALICE, "one"], "a") and exports.find_file(tokens[ALICE, "two"], "a")
    replaced, _ = exports.link(LinkedExport(ALICE, "two", "the folder before", files))
    assert not exports.find_file(replaced, "a")


def test_a_run_shows_its_newest_checkpoints_however_many_there_are(serve: Serve) -> None:
    async def body(client: Client) -> None:
        model = await model_of(client, await session_of(client))
        for seq, name in enumerate("abc", start=1):
            await finished(client, await client.post("save_weights", {"model_id": model, "seq_id": seq, "path": name}))
        await client.post(f"training_runs/{model}/checkpoints/weights/b/publish")
        bob = client.of("tml-bob")
        own, others = (await client.get("training_runs")).json, (await bob.get("training_runs?access_scope=accessible")).json
        newest = [page["training_runs"][0]["last_checkpoint"]["checkpoint_id"] for page in (own, others)]
        assert newest == ["weights/c", "weights/b"]

    serve(body)


@pytest.mark.parametrize(("headers", "version", "external"), [
    ({"user-agent": "AsyncTinker/Python 0.38.0"}, (0, 38), True), ({"user-agent": "AsyncTinker/Python 0.30.4"}, (0, 30), True),
    ({"user-agent": "AsyncTinker/Python 0.28.0rc1"}, (0, 28), True), ({"user-agent": "AsyncTinker/Python 0.27.2"}, (0, 27), False),
    ({"user-agent": "AsyncTinker/Python 0.9.0"}, (0, 9), False), ({"user-agent": "AsyncTinker/Python 1.0"}, (1, 0), True),
    ({"user-agent": "curl/8.0", "x-sdk-version": "0.25.1"}, (0, 25), False),
    ({"user-agent": "curl/8.0"}, None, True), ({}, None, True), ({"x-sdk-version": "new"}, None, True),
    ({"user-agent": "AsyncTinker/Python " + "9" * 100}, None, True)])
def test_the_version_is_what_the_headers_say(headers: dict[str, str], version: tuple[int, int] | None, external: bool) -> None:
    assert sdk_version(headers) == version and knows_external(headers) is external
