"""Bodies of requests, bounded while they arrive: one by one, and all that are held at a time together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from offbeat.service.errors import BadRequestError, OverLimitError, RequestError, TooLargeError
from offbeat.service.wire.unpack import unpack

_ARRIVAL_TIMEOUT_S = 300.0
_HELD_BODIES = 4


class Bodies:
    """Reads bodies of at most `max_bytes`, and holds at most a few times as much at once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0

    @asynccontextmanager
    async def reading(self, http: Request) -> AsyncIterator[bytes]:
        """The whole body, unpacked if it came packed; it counts as held while the block runs.

        Raises:
            TooLargeError: it is larger than allowed, as it came or unpacked.
            OverLimitError: other requests' bodies fill the memory that there is for them.
            BadRequestError: its encoding is unknown, or it did not arrive in time.
        """
        arrival = _Arrival()
        try:
            yield await self._unpacked(http, await self._receive(http, arrival))
        finally:
            self._held_bytes -= arrival.num_bytes

    async def _receive(self, http: Request, arrival: "_Arrival") -> bytes:
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(_ARRIVAL_TIMEOUT_S):
                async for chunk in http.stream():
                    self._hold(len(chunk), arrival)
                    chunks.append(chunk)
        except TimeoutError as exc:
            raise BadRequestError(f"the body did not arrive within {_ARRIVAL_TIMEOUT_S:g} s; send less at once") from exc
        except ClientDisconnect as exc:
            raise RequestError("the client went away while it sent its body") from exc
        return b"".join(chunks)

    async def _unpacked(self, http: Request, body: bytes) -> bytes:
        match http.headers.get("content-encoding", "identity").lower():
            case "identity":
                return body
            case "zstd":
                return await asyncio.to_thread(unpack, body, max_bytes=self._max_bytes)
            case other:
                raise BadRequestError(f"Content-Encoding must be zstd, or absent, got {other[:40]!r}")

    def _hold(self, size: int, arrival: "_Arrival") -> None:
        if arrival.num_bytes + size > self._max_bytes:
            raise TooLargeError(
                f"the body is larger than {self._max_bytes} bytes; send less at once, or raise serve.max_body_bytes on the server")
        if self._held_bytes + size > _HELD_BODIES * self._max_bytes:
            raise OverLimitError("this server is receiving as much as it can hold; send the request again in a moment", retry_after_s=2.0)
        arrival.num_bytes += size
        self._held_bytes += size


@dataclass
class _Arrival:
    """What has come of one body."""

    num_bytes: int = 0
