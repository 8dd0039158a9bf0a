"""Bodies are bounded as they come, as they unpack, and all together."""

import asyncio
from contextlib import AsyncExitStack, nullcontext
from typing import Any

import pytest
import zstandard
from starlette.requests import Request

from offbeat.service.app.body import Bodies
from offbeat.service.errors import BadRequestError, OverLimitError, RequestError, TooLargeError

LIMIT = 2**20


def request(*chunks: bytes, encoding: str = "") -> Request:
    """A request whose body comes in these pieces."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    pieces = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(pieces)

    headers = [(b"content-encoding", encoding.encode())] if encoding else []
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


async def read(bodies: Bodies, http: Request) -> bytes:
    async with bodies.reading(http, "alice") as body:
        return body


def test_a_body_is_whole_and_unpacked():
    bodies = Bodies(LIMIT)
    assert asyncio.run(read(bodies, request(b"one ", b"two"))) == b"one two"
    packed = zstandard.compress(bytes(LIMIT))
    assert asyncio.run(read(bodies, request(packed[:9], packed[9:], encoding="zstd"))) == bytes(LIMIT)


@pytest.mark.parametrize(("http", "error", "sentence"), [
    (lambda: request(bytes(LIMIT), b"1"), TooLargeError, "larger than 1048576 bytes"),
    (lambda: request(zstandard.compress(bytes(LIMIT + 1)), encoding="zstd"), TooLargeError, "unpacks to 1048577"),
    (lambda: request(b"not zstd", encoding="zstd"), BadRequestError, "does not unpack"),
    (lambda: request(b"", encoding="br"), BadRequestError, "Content-Encoding must be zstd, or absent, got 'br'"),
])
def test_what_is_too_large_or_packed_strangely_is_refused(http: Any, error: type[Exception], sentence: str):
    bodies = Bodies(LIMIT)
    with pytest.raises(error, match=sentence):
        asyncio.run(read(bodies, http()))
    assert asyncio.run(read(bodies, request(bytes(LIMIT)))), "nothing is held any more"


def test_a_client_that_goes_away_leaves_nothing():
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    bodies = Bodies(LIMIT)
    with pytest.raises(RequestError, match="went away"):
        asyncio.run(read(bodies, Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)))


@pytest.mark.parametrize(("owners", "alice_may"), [
    (("bob", "bob"), True), (("bob", "bob", "carol", "carol"), False), (("alice", "alice"), False)])
def test_all_bodies_together_and_those_of_an_owner_are_bounded_but_small_ones_come_through(owners: tuple[str, ...], alice_may: bool):
    async def body() -> None:
        bodies, large = Bodies(LIMIT), bytes(LIMIT // 2)
        async with AsyncExitStack() as stack:
            for owner in owners:
                await stack.enter_async_context(bodies.reading(request(bytes(LIMIT)), owner))
            with nullcontext() if alice_may else pytest.raises(OverLimitError, match="as much as it can hold"):
                assert await read(bodies, request(large)) == large
            assert await read(bodies, request(b"a heartbeat")) == b"a heartbeat"
        assert await read(bodies, request(large)) == large and not bodies._held

    asyncio.run(body())


@pytest.mark.parametrize("with_size", [True, False])
def test_what_a_body_unpacks_to_is_held_too(with_size: bool):
    packed = zstandard.ZstdCompressor(write_content_size=with_size).compress(bytes(LIMIT))

    async def body() -> None:
        bodies = Bodies(LIMIT)
        async with bodies.reading(request(packed, encoding="zstd"), "alice"):
            with pytest.raises(OverLimitError, match="as much as it can hold"):
                await read(bodies, request(packed, encoding="zstd"))

    asyncio.run(body())


def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.service.app.body._ARRIVAL_TIMEOUT_S", 0.05)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    with pytest.raises(BadRequestError, match="did not arrive within"):
        asyncio.run(read(Bodies(LIMIT), Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)))
