"""The gate before every handler: keys, bodies, errors as answers, and a log line for each."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import Response

from http_serving import Client, serving
from offbeat.errors import StorageError
from offbeat.service.app.app import make_app
from offbeat.service.app.body import Bodies
from offbeat.service.app.journal import Journal
from offbeat.service.app.reply import Call, Endpoint, answer
from offbeat.service.errors import BadRequestError, LostError, OverLimitError, UnknownError
from offbeat.service.keys import Keys
from offbeat.telemetry.log import set_up_logging
from waiting import until

ALICE, BOB = "tml-alice-0123456789", "tml-bob-0123456789ab"
KEYS = f'[owners.alice]\nkey = "{ALICE}"\n[owners.bob]\nkey = "{BOB}"\n'
ERRORS = {
    "bad": BadRequestError("seq_id must be at least 1"), "unknown": UnknownError("there is no such thing"),
    "lost": LostError("send it again"), "busy": OverLimitError("too much under way", retry_after_s=2.5),
    "full": StorageError("the database postgresql://secret@db is out of reach"), "bug": ZeroDivisionError("secret detail")}


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    set_up_logging(tmp_path / "log.jsonl", as_json=True)
    return tmp_path / "log.jsonl"


async def echo(call: Call) -> Response:
    return answer({"owner": call.caller.owner, "body": call.body.decode()})


async def fail(call: Call) -> Response:
    raise ERRORS[call.param("how")]


@asynccontextmanager
async def gate(
    tmp_path: Path, registry: CollectorRegistry | None = None, keys: Keys | None = None, let_go: asyncio.Event | None = None,
) -> AsyncIterator[tuple[Client, Journal]]:
    """`let_go` answers polls."""
    let_go = let_go or asyncio.Event()
    (tmp_path / "keys.toml").write_text(KEYS)
    journal = Journal(registry or CollectorRegistry())

    async def poll(_: Call) -> Response:
        await let_go.wait()
        return answer({})

    endpoints = [
        Endpoint("POST", "/api/v1/echo", echo, max_body_bytes=1000), Endpoint("POST", "/api/v1/large", echo, max_body_bytes=None),
        Endpoint("GET", "/api/v1/fail/{how}", fail), Endpoint("GET", "/api/v1/poll", poll)]
    app = make_app(
        endpoints, [], keys=keys or Keys.load(tmp_path / "keys.toml"), bodies=Bodies(2**20), journal=journal, max_requests_of_one=3)
    async with serving(app) as client:
        yield replace(client, key=ALICE), journal


def test_a_request_reaches_its_handler_with_its_owner_and_its_body(tmp_path: Path):
    async def body() -> None:
        async with gate(tmp_path) as (client, _):
            assert (await client.post("echo", b"hello")).json == {"owner": "alice", "body": "hello"}
            packed = zstandard.compress(b"packed")
            there = await client.of(BOB).post("large", packed, headers={"content-encoding": "zstd"})
            assert there.json == {"owner": "bob", "body": "packed"} and len(there.headers["x-request-id"]) == 12
            for key in ("", "tml-mallory", "sk-1"):
                refused = await client.of(key).post("echo", b"hello")
                assert refused.status == 401 and "TINKER_API_KEY" in refused.detail

    asyncio.run(body())


def test_a_body_is_read_within_the_limit_of_its_endpoint_and_unpacked_where_that_is_allowed(tmp_path: Path):
    async def body() -> None:
        async with gate(tmp_path) as (client, _):
            large = await client.post("echo", bytes(1001))
            assert large.status == 413 and "larger than 1000 bytes" in large.detail
            packed = await client.post("echo", zstandard.compress(b"packed"), headers={"content-encoding": "zstd"})
            assert packed.status == 422 and "takes no Content-Encoding, got 'zstd'" in packed.detail
            assert (await client.post("large", bytes(2**20))).status == 200

    asyncio.run(body())


def test_an_owner_has_so_many_requests_at_a_time_whatever_others_have(tmp_path: Path):
    async def body() -> None:
        let_go = asyncio.Event()
        async with gate(tmp_path, let_go=let_go) as (client, _):
            asked = [asyncio.create_task(each.get("poll")) for each in [*[client] * 5, client.of(BOB)]]
            await until(lambda: sum(one.done() for one in asked) >= 2)
            let_go.set()
            answers = await asyncio.gather(*asked)
            assert sorted(answer.status for answer in answers) == [200, 200, 200, 200, 429, 429] and answers[-1].status == 200
            assert (await client.get("poll")).status == 200

    asyncio.run(body())


@pytest.mark.parametrize(("how", "status", "sentence", "retry"), [
    ("bad", 422, "seq_id must be at least 1", None), ("unknown", 404, "there is no such thing", None), ("lost", 410, "send it again", None),
    ("busy", 429, "too much under way", "2.5"), ("full", 503, "cannot do that for now", "2"), ("bug", 500, "its log has the reason", None)])
def test_every_error_is_a_status_and_one_sentence(
    tmp_path: Path, log_file: Path, how: str, status: int, sentence: str, retry: str | None,
):
    async def body() -> None:
        async with gate(tmp_path) as (client, journal):
            refused = await client.get(f"fail/{how}")
            assert refused.status == status and sentence in refused.detail and "secret" not in refused.detail
            assert refused.headers.get("retry-after") == retry
            found = [(trouble.request_id, trouble.owner) for trouble in journal.troubles if sentence in trouble.sentence]
            assert found == ([] if how == "busy" else [(refused.headers["x-request-id"], "alice")])
            rows = [json.loads(line) for line in log_file.read_text().splitlines()]
            assert all(row["request"] == refused.headers["x-request-id"] for row in rows)
            assert (rows[-1]["owner"], rows[-1]["status"]) == ("alice", status)
            assert any("ZeroDivisionError: secret detail" in row.get("traceback", "") for row in rows) is (how == "bug")
            assert any("postgresql://secret@db" in row["message"] for row in rows) is (how == "full")

    asyncio.run(body())


def test_paths_and_methods_that_are_not_there_are_told(tmp_path: Path):
    async def body() -> None:
        async with gate(tmp_path) as (client, _):
            absent = await client.get("audit")
            assert (absent.status, absent.detail) == (404, "this server has no GET /api/v1/audit")
            wrong = await client.get("echo")
            assert (wrong.status, wrong.detail) == (405, "/api/v1/echo does not take GET")

    asyncio.run(body())


@pytest.mark.parametrize("any_key", [True, False])
@pytest.mark.parametrize(("name", "is_local"), [
    ("localhost:8000", True), ("[::1]:8000", True), ("127.0.0.1", True), ("evil.example", False), ("127.0.0.1.evil.example:80", False)])
def test_where_any_key_will_do_only_names_of_this_machine_are_answered_to(tmp_path: Path, any_key: bool, name: str, is_local: bool):
    async def body() -> None:
        async with gate(tmp_path, keys=Keys.open_house() if any_key else None) as (client, _):
            answer = await client.post("echo", b"hello", headers={"host": name})
            assert answer.status == (403 if any_key and not is_local else 200)
            assert answer.status == 200 or "start it with --keys" in answer.detail

    asyncio.run(body())


def test_requests_are_counted_by_endpoint_and_status(tmp_path: Path):
    async def body() -> None:
        registry = CollectorRegistry()
        async with gate(tmp_path, registry) as (client, _):
            for how in ("bad", "bad", "lost"):
                await client.get(f"fail/{how}")
            text = generate_latest(registry).decode()
            assert 'offbeat_http_requests_total{endpoint="fail/{how}",status="422"} 2.0' in text
            assert 'offbeat_http_seconds_count{endpoint="fail/{how}"} 3.0' in text

    asyncio.run(body())
