"""Bodies of requests, bounded while they arrive: one by one, those of an owner together, and all that are held at a time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from offbeat.service.errors import BadRequestError, OverLimitError, RequestError, TooLargeError
from offbeat.service.wire.unpack import unpack, unpacked_size

_ARRIVAL_TIMEOUT_S = 300.0
_HELD_BODIES, _HELD_BY_ONE = 4, 2
_SMALL_BYTES = 1 << 16


class Bodies:
    """Reads bodies of at most `max_bytes`, and holds at most a few times as much at once: half of it for one owner, so that who sends
    slowly does not keep others out. Small bodies are always let in, so that heartbeats and polls come through.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()

    @asynccontextmanager
    async def reading(self, http: Request, owner: str) -> AsyncIterator[bytes]:
        """The whole body, unpacked if it came packed; it counts as held while the block runs.

        Raises:
            TooLargeError: it is larger than allowed, as it came or unpacked.
            OverLimitError: other requests' bodies fill the memory that there is for them.
            BadRequestError: its encoding is unknown, or it did not arrive in time.
        """
        arrival = _Arrival(owner)
        try:
            yield await self._unpacked(http, await self._receive(http, arrival), arrival)
        finally:
            self._held[owner] -= arrival.num_bytes
            if not self._held[owner]:
                del self._held[owner]

    async def _receive(self, http: Request, arrival: "_Arrival") -> bytes:
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(_ARRIVAL_TIMEOUT_S):
                async for chunk in http.stream():
                    if arrival.num_bytes + len(chunk) > (most := self._max_bytes):
                        raise TooLargeError(
                            f"the body is larger than {most} bytes; send less at once, or raise serve.max_body_bytes on the server")
                    self._hold(len(chunk), arrival)
                    chunks.append(chunk)
        except TimeoutError as exc:
            raise BadRequestError(f"the body did not arrive within {_ARRIVAL_TIMEOUT_S:g} s; send less at once") from exc
        except ClientDisconnect as exc:
            raise RequestError("the client went away while it sent its body") from exc
        return b"".join(chunks)

    async def _unpacked(self, http: Request, body: bytes, arrival: "_Arrival") -> bytes:
        match http.headers.get("content-encoding", "identity").lower():
            case "identity":
                return body
            case "zstd":
                self._hold(unpacked_size(body, max_bytes=self._max_bytes), arrival)
                return await asyncio.to_thread(unpack, body, max_bytes=self._max_bytes)
            case other:
                raise BadRequestError(f"Content-Encoding must be zstd, or absent, got {other[:40]!r}")

    def _hold(self, size: int, arrival: "_Arrival") -> None:
        full = self._held.total() + size > _HELD_BODIES * self._max_bytes
        if arrival.num_bytes + size > _SMALL_BYTES and (full or self._held[arrival.owner] + size > _HELD_BY_ONE * self._max_bytes):
            raise OverLimitError("this server is receiving as much as it can hold; send the request again in a moment", retry_after_s=2.0)
        arrival.num_bytes += size
        self._held[arrival.owner] += size


@dataclass
class _Arrival:
    """What has come of one body."""

    owner: str
    num_bytes: int = 0
