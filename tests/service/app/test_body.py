"""Bodies are bounded as they come, as they unpack, and all together."""

import asyncio
import time
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import zstandard
from starlette.requests import Request

from offbeat.listening import extend
from offbeat.service.app.body import Bodies
from offbeat.service.errors import BadRequestError, OverLimitError, RequestError, SlowBodyError, TooLargeError
from waiting import until

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


class Trickle:
    """A request that sends so many bytes at once, and then one of a size every so often."""

    def __init__(self, first: int, size: int, every_s: float) -> None:
        self.sent = 0
        self._first, self._size, self._every_s = first, size, every_s

    async def receive(self) -> dict[str, Any]:
        if self.sent:
            await asyncio.sleep(self._every_s)
        size = self._size if self.sent else self._first
        self.sent += size
        return {"type": "http.request", "body": bytes(size), "more_body": True}

    def request(self, **headers: str) -> Request:
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, self.receive)


@pytest.mark.parametrize(("first", "size", "every_s"), [(9, 0, 60.0), (LIMIT - 1, 0, 60.0), (LIMIT // 2, 1, 0.01), (1, 100, 0.02)])
def test_a_body_that_stalls_or_trickles_is_given_up_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch, first: int, size: int, every_s: float,
):
    monkeypatch.setattr("offbeat.service.app.body.PATIENCE_S", 0.2)
    bodies, begin = Bodies(LIMIT), time.monotonic()
    with pytest.raises(SlowBodyError, match="fewer than 16384 a second for 0.2 s"):
        asyncio.run(read(bodies, Trickle(first, size, every_s).request()))
    assert time.monotonic() - begin < 50 and not bodies._held


def test_a_body_that_arrives_fast_enough_may_take_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.service.app.body.PATIENCE_S", 0.6)
    monkeypatch.setattr("offbeat.service.app.body.extend", partial(extend, min_bytes_per_s=1000))
    trickle = Trickle(100, 1000, 0.03)
    with pytest.raises(TooLargeError):
        asyncio.run(read(Bodies(40_000), trickle.request()))
    assert trickle.sent > 40_000


def test_a_body_that_says_that_it_is_too_large_is_not_received():
    trickle = Trickle(10, 10, 60)
    with pytest.raises(TooLargeError, match="larger than 1048576 bytes"):
        asyncio.run(read(Bodies(LIMIT), trickle.request(content_length=str(LIMIT + 1))))
    assert trickle.sent == 0


def test_slow_bodies_give_way_where_all_are_full():
    async def body() -> None:
        bodies = Bodies(LIMIT)

        async def hold(owner: str) -> None:
            async with bodies.reading(Trickle(LIMIT - 1, 0, 60).request(), owner):
                raise AssertionError("it never ends")

        slow = [asyncio.create_task(hold(owner)) for owner in ("mallory", "mallory", "trudy", "trudy")]
        await until(lambda: bodies._held.total() == 4 * (LIMIT - 1))
        with pytest.raises(OverLimitError, match="as much as it can hold"):
            await read(bodies, request(bytes(LIMIT)))
        assert not any(task.done() for task in slow), "they have just begun"
        for arrival in bodies._arriving:
            arrival._last -= 10
        with pytest.raises(OverLimitError, match="as much as it can hold"):
            await read(bodies, request(bytes(LIMIT)))
        (given_up,), _ = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(given_up.exception(), OverLimitError)
        assert len(await read(bodies, request(bytes(LIMIT)))) == LIMIT, "sent again, it finds room"
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert not bodies._held and not bodies._arriving

    asyncio.run(body())
