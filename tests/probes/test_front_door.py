"""Who has no key, or sends what nobody should, takes neither memory, nor places, nor the server's time from others."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zstandard

from http_serving import Answer, Client
from protocol import PROTOBUF, base_sampler, finished, model_of, sample_body, session_of
from sdk.server import MODEL_NAME, Server
from support.probing import run_probe

OWNERS = ("alice", "bob", "mallory", "trudy")
PLACES = 60
LARGEST = 4 << 20
LONGEST_STALL_S = 0.25


def key_of(owner: str) -> str:
    return f"tml-{owner}-0123456789abcdef"


@dataclass(frozen=True)
class Door:
    """A server with keys and narrow limits."""

    server: Server

    def run(self, body: Callable[[Client], Awaitable[None]]) -> None:
        """Run a body that is given alice's client."""
        run_probe(self.server, lambda client: body(client.of(key_of("alice"))))

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        connection.sendall(data)
        return connection

    @property
    def process(self) -> psutil.Process:
        assert self.server.process is not None
        return psutil.Process(self.server.process.pid)

    def loop_s(self) -> float:
        """CPU seconds that the thread of the event loop has taken."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


@pytest.fixture(scope="module")
def door(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """One server for the probes of this file."""
    folder = tmp_path_factory.mktemp("door")
    (folder / "keys.toml").write_text("".join(f'[owners.{owner}]\nkey = "{key_of(owner)}"\n' for owner in OWNERS))
    options = (
        "--keys", str(folder / "keys.toml"), "--serve.max_connections", str(PLACES), "--serve.max_body_bytes", str(LARGEST),
        "--serve.allowed_hosts", '["proxy.example"]')
    with Server(served_model, folder, *options) as running:
        yield Door(running)


def everything(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    received = b""
    with suppress(ConnectionError):
        while piece := connection.recv(65536):
            received += piece
    return received


def post(name: str, owner: str, *, length: int, encoding: str = "") -> bytes:
    """The head of a request."""
    packed = f"content-encoding: {encoding}\r\n" if encoding else ""
    return (
        f"POST /api/v1/{name} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key_of(owner)}\r\ncontent-type: application/x-protobuf\r\n{packed}"
        f"content-length: {length}\r\n\r\n").encode()


def test_two_hundred_mebibytes_of_header_are_refused_and_take_no_memory(door: Door) -> None:
    before, sent = door.process.memory_info().rss, 0
    with closing(door.connect(b"GET / HTTP/1.1\r\nx: ")) as connection, suppress(ConnectionError):
        for _ in range(200):
            connection.sendall(b"x" * 2**20)
            sent += 1
    assert sent < 100
    assert door.process.memory_info().rss - before < 32 << 20
    with closing(door.connect(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 1000 + b"\r\n")) as connection:
        assert everything(connection).startswith(b"HTTP/1.1 431 ")


def test_half_sent_requests_beyond_all_places_shut_nobody_out(door: Door) -> None:
    async def body(alice: Client) -> None:
        with ExitStack() as stack:
            for _ in range(3 * PLACES):
                stack.enter_context(closing(door.connect(b"POST /api/v1/create_session HTTP/1.1\r\nhost: local")))
            assert (await alice.get("healthz")).status == 200 and await session_of(alice)
            assert door.process.num_fds() < PLACES + 100

    door.run(body)


def test_a_head_and_a_body_that_do_not_come_end_with_a_sentence(door: Door) -> None:
    starts = {
        b"GET / HTTP/1.1\r\nhost: local": b"the head of a request did not arrive within 10 s",
        post("forward_backward", "alice", length=1000) + b"x" * 999: b"fewer than 16384 a second for 10 s",
        post("create_session", "alice", length=1000): b"fewer than 16384 a second for 10 s"}
    with ExitStack() as stack:
        connections = {start: stack.enter_context(closing(door.connect(start))) for start in starts}
        for start, sentence in starts.items():
            answer = everything(connections[start])
            assert answer.startswith(b"HTTP/1.1 408 ") and sentence in answer


def test_without_a_key_no_body_is_waited_for(door: Door) -> None:
    begin = time.monotonic()
    with closing(door.connect(post("forward_backward", "nobody", length=LARGEST))) as keyless, closing(
        door.connect(post("session_heartbeat", "alice", length=LARGEST))) as large:
        assert everything(keyless).startswith(b"HTTP/1.1 401 ") and b"larger than 1048576 bytes" in everything(large)
    assert time.monotonic() - begin < 9, "and neither connection stays open for what may still come"


def test_bodies_a_byte_short_do_not_lock_out_large_ones(door: Door) -> None:
    async def body(alice: Client) -> None:
        short = b"\x0a" + b"\xff" * (LARGEST - 2)
        with ExitStack() as stack:
            for owner in ("mallory", "mallory", "trudy", "trudy"):
                stack.enter_context(closing(door.connect(post("forward_backward", owner, length=LARGEST) + short)))
            await asyncio.sleep(1.0)  # until they are held
            begin = time.monotonic()
            while (answer := await alice.post("forward_backward", short + b"\xff", headers=PROTOBUF)).status == 429:
                assert time.monotonic() - begin < 9, "they would have ended by themselves after 10 s"
                await asyncio.sleep(0.5)
            assert answer.status == 422  # it was read whole, and is nonsense

    door.run(body)


def hostile_bodies(sampler: str) -> dict[str, tuple[str, bytes, dict[str, str]]]:
    """Bodies that cost much to read, each with its endpoint and header."""
    prompt = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 600_000}]}, "sampling_params": {}, "sampling_session_id": sampler}
    deep = b'{"prompt": ' + b'{"a": [' * 200_000
    many = b'{"session_id": "s", "user_metadata": {' + b",".join(b'"%x": 1' % n for n in range(70_000)) + b"}}"
    wrong = msgspec.json.encode(prompt | {"seq_id": "x", "more": [[]] * 300_000})
    fields = b"\x10\x01"
    zstd = {"content-encoding": "zstd"}
    return {
        "a long prompt": ("asample", msgspec.json.encode(prompt | {"seq_id": 1}), {}),
        "a wrong field at the end": ("asample", wrong, {}),
        "lists within lists": ("asample", deep, {}),
        "many fields": ("create_session", many, {}),
        "packed JSON": ("asample", zstandard.compress(wrong), zstd),
        "packed JSON of zeros": ("create_session", zstandard.compress(b" " * (16 << 20)), zstd),
        "many small fields": ("forward_backward", fields * (16 << 10), PROTOBUF),
        "a large body of small fields": ("forward_backward", fields * (1 << 18), PROTOBUF),
        "packed fields": ("forward_backward", zstandard.compress(fields * (1 << 18)), PROTOBUF | zstd),
        "a packed bomb": ("forward_backward", zstandard.compress(bytes(256 << 20)), PROTOBUF | zstd)}


def test_no_body_costs_the_event_loop_more_than_a_moment(door: Door) -> None:
    async def body(alice: Client) -> None:
        mallory = alice.of(key_of("mallory"))
        costs, sampler = {}, await base_sampler(mallory, base_model=MODEL_NAME)
        for name, (endpoint, content, headers) in hostile_bodies(sampler).items():
            before = door.loop_s()
            answer = await mallory.post(endpoint, content, headers=headers)
            costs[name] = door.loop_s() - before
            assert answer.status in (413, 422) and len(answer.body) < 1000, (name, answer.status, answer.body[:300])
        assert max(costs.values()) < LONGEST_STALL_S, costs

    door.run(body)


def test_the_status_is_shown_under_no_other_name_and_to_nobody_behind_a_proxy(door: Door) -> None:
    async def body(alice: Client) -> None:
        stranger = alice.of("")

        async def seen(**headers: str) -> set[int]:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            return {(await stranger.ask("GET", path, headers=given)).status for path in ("/", "/status.json", "/metrics")}

        assert await seen() == await seen(host="localhost:8000") == await seen(host="proxy.example") == {200}
        assert await seen(host="evil.example") == await seen(host="127.0.0.1.evil.example") == {403}
        for header in ("x_forwarded_for", "forwarded", "x_real_ip"):
            assert await seen(**{header: "127.0.0.1"}) == {404}
        assert (await alice.ask("GET", "/api/v1/get_server_capabilities", headers={"host": "evil.example"})).status == 200, "it has a key"

    door.run(body)


def test_an_export_link_ends_with_its_checkpoint(door: Door) -> None:
    async def body(alice: Client) -> None:
        model = await model_of(alice, await session_of(alice), base_model=MODEL_NAME)
        await finished(alice, await alice.post("save_weights_external", {"model_id": model, "seq_id": 1, "path": "out"}))
        export = f"training_runs/{model}/checkpoints/external_weights/out"
        bob = alice.of(key_of("bob"))

        async def link(client: Client) -> str:
            urls = (await client.get(f"{export}/external_weights_urls")).json["urls"]
            return urls["adapter_config.json"].removeprefix(alice.url)

        async def fetched(path: str) -> int:
            return (await alice.of("").ask("GET", path)).status

        own = await link(alice)
        assert await link(alice) == own and await fetched(own) == 200
        await alice.post(f"{export}/publish")
        lent = await link(bob)
        assert lent != own and await fetched(lent) == 200
        await alice.ask("DELETE", f"/api/v1/{export}/publish")
        assert await fetched(lent) == 404 == await fetched(own) and (await bob.get(f"{export}/external_weights_urls")).status == 404
        own = await link(alice)
        assert await fetched(own) == 200
        await alice.ask("DELETE", f"/api/v1/{export}")
        assert await fetched(own) == 404

    door.run(body)


def test_wrong_keys_push_no_owners_errors_off_the_page(door: Door) -> None:
    async def body(alice: Client) -> None:
        await alice.post("get_info", {"model_id": "what alice should see"})
        guesses: list[Answer] = []
        for number in range(10):
            guesses += await asyncio.gather(*(alice.of(f"tml-guess-{number}-{n}").post("get_info", {}) for n in range(20)))
        assert {guess.status for guess in guesses} == {401}
        page: dict[str, Any] = (await alice.of("").ask("GET", "/status.json")).json
        assert any("what alice should see" in trouble["sentence"] for trouble in page["troubles"])
        assert page["strangers"]["requests"] >= 200 and not any(not trouble["owner"] for trouble in page["troubles"])

    door.run(body)


def test_stop_strings_are_few_and_short(door: Door) -> None:
    async def body(alice: Client) -> None:
        session = await session_of(alice)
        sampler = (await alice.post("create_sampling_session", {
            "session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL_NAME})).json["sampling_session_id"]
        for stop in (["a" * 999] * 64, ["a"] * 65, ["a" * 1001]):
            refused = await alice.post("asample", sample_body(sampler, 1, [5, 6], stop=stop, max_tokens=4))
            assert refused.status == 422 and "sampling_params.stop" in refused.detail
        stop = ["a" * 63 + chr(0x100 + n) for n in range(64)]
        done = await finished(alice, await alice.post("asample", sample_body(sampler, 2, [5, 6], stop=stop, max_tokens=8)))
        assert len(done["sequences"]) == 1

    door.run(body)
