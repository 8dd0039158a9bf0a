"""Reads request bodies within bounds: for each body, for each owner's bodies together, and for all that are held at a time.

A body must arrive at a minimum rate, so that slow senders do not hold memory. Used by `app`, once the key is known.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from offbeat.listening import MIN_BYTES_PER_S, PATIENCE_S, extend
from offbeat.service.errors import BadRequestError, OverLimitError, RequestError, SlowBodyError, TooLargeError
from offbeat.service.wire.unpack import unpack, unpacked_size

_FAST_BYTES_PER_S = 1 << 20
_RATE_OVER_S = 1.0
_HELD_BODIES, _HELD_BY_ONE = 4, 2
_SMALL_BYTES = 1 << 16
_JOINED_AT_ONCE_BYTES = 1 << 20


class Bodies:
    """Reads bodies, and holds at most a few times the largest at once, half of that for one owner.

    Small bodies are always accepted, so that heartbeats and polls get through. When all memory is taken, the slowest of the bodies that
    arrive slowly is dropped to make room for the newcomer, which is refused for now and sent again.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` is the size of the largest body of all endpoints."""
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()
        self._arriving: dict[_Arrival, asyncio.Timeout] = {}

    @asynccontextmanager
    async def reading(self, http: Request, owner: str, *, max_bytes: int | None = None, may_be_packed: bool = True) -> AsyncIterator[bytes]:
        """Yield the whole body, decompressed if necessary; it counts as held while the block runs.

        Args:
            max_bytes: limit for the body as sent and decompressed; None for the limit of all endpoints.
            may_be_packed: whether zstd is accepted.

        Raises:
            TooLargeError: the body is larger than allowed, as sent or decompressed.
            OverLimitError: other requests' bodies fill the memory set aside for them.
            BadRequestError: its encoding is unknown.
            SlowBodyError: it arrives too slowly.
        """
        arrival = _Arrival(owner, self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes))
        packed = _is_packed(http, may_be_packed=may_be_packed)
        try:
            body = await self._receive(http, arrival)
            if packed:
                self._hold(unpacked_size(body, max_bytes=arrival.max_bytes), arrival)
                body = await asyncio.to_thread(unpack, body, max_bytes=arrival.max_bytes)
            yield body
        finally:
            self._held[owner] -= arrival.num_bytes
            if not self._held[owner]:
                del self._held[owner]

    async def _receive(self, http: Request, arrival: "_Arrival") -> bytes:
        declared = http.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > arrival.max_bytes:
            raise arrival.too_large()
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(PATIENCE_S) as patience:
                self._arriving[arrival] = patience
                async for chunk in http.stream():
                    if arrival.num_bytes + len(chunk) > arrival.max_bytes:
                        raise arrival.too_large()
                    self._hold(len(chunk), arrival)
                    chunks.append(chunk)
                    arrival.add(len(chunk))
                    if not arrival.gives_way:
                        extend(patience, len(chunk), patience_s=PATIENCE_S)
        except TimeoutError as exc:
            raise arrival.ended() from exc
        except ClientDisconnect as exc:
            raise RequestError("the client went away while it sent its body") from exc
        finally:
            self._arriving.pop(arrival, None)
        return b"".join(chunks) if arrival.num_bytes < _JOINED_AT_ONCE_BYTES else await asyncio.to_thread(b"".join, chunks)

    def _hold(self, size: int, arrival: "_Arrival") -> None:
        if arrival.num_bytes + size > _SMALL_BYTES:
            if self._held.total() + size > _HELD_BODIES * self._max_bytes:
                self._end_slowest(arrival)
                raise _full()
            if self._held[arrival.owner] + size > _HELD_BY_ONE * self._max_bytes:
                raise _full()
        arrival.num_bytes += size
        self._held[arrival.owner] += size

    def _end_slowest(self, newcomer: "_Arrival") -> None:
        """Drop the slowest of the bodies that arrive slowly, to make room for the newcomer's next try."""
        slow = {
            other: rate for other in self._arriving
            if other is not newcomer and other.num_bytes > _SMALL_BYTES and (rate := other.rate()) < _FAST_BYTES_PER_S}
        if slow:
            slowest = min(slow, key=lambda other: slow[other])
            slowest.gives_way = True
            self._arriving.pop(slowest).reschedule(asyncio.get_running_loop().time())


class _Arrival:
    def __init__(self, owner: str, max_bytes: int) -> None:
        self.owner = owner
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.gives_way = False
        self._rate, self._last = 4.0 * _FAST_BYTES_PER_S, time.monotonic()  # a body that has just begun does not count as slow

    def add(self, num_bytes: int) -> None:
        self._rate = self.rate() + num_bytes / _RATE_OVER_S
        self._last = time.monotonic()

    def rate(self) -> float:
        """Return the recent rate in bytes per second, an exponentially weighted average."""
        return self._rate * math.exp((self._last - time.monotonic()) / _RATE_OVER_S)

    def too_large(self) -> TooLargeError:
        return TooLargeError(
            f"the body is larger than {self.max_bytes} bytes, as many as this endpoint takes; send less at once, or, if it is data to "
            "train on, raise serve.max_body_bytes on the server")

    def ended(self) -> Exception:
        """Return the error for a body that the server stopped waiting for."""
        if self.gives_way:
            return _full()
        return SlowBodyError(
            f"{self.num_bytes} bytes of the body arrived, and then fewer than {MIN_BYTES_PER_S} a second for {PATIENCE_S:g} s; send it "
            "again, with less at once if your connection is slow")


def _full() -> OverLimitError:
    return OverLimitError("this server is receiving as much as it can hold; send the request again in a moment", retry_after_s=2.0)


def _is_packed(http: Request, *, may_be_packed: bool) -> bool:
    encoding = http.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return False
    if not may_be_packed:
        raise BadRequestError(f"this endpoint takes no Content-Encoding, got {encoding[:40]!r}; only data to train on may be packed")
    if encoding != "zstd":
        raise BadRequestError(f"Content-Encoding must be zstd, or absent, got {encoding[:40]!r}")
    return True
