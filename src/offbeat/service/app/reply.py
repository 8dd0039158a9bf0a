"""Types shared by handlers: what is served, a checked request, and answers as JSON or as a payload."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from offbeat.service.app.readers import SMALL_BYTES, Readers
from offbeat.service.types import Caller, Payload
from offbeat.service.wire.json_body import MAX_JSON_BYTES, read_json
from offbeat.service.wire.limits import WireLimits

_JSON = "application/json"
T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """The base model, and the limits of requests to it.

    Attributes:
        tokenizer_id: what clients load the tokenizer by.
        alpha: alpha of every adapter.
        stable_reinforce: name of the loss that substitutes for the one of that name; empty refuses it.
        aliases: other names of the base model.
        sampled: limits of the models that are only sampled, by name.
    """

    base_model: str
    tokenizer_id: str
    alpha: float
    limits: WireLimits
    stable_reinforce: str = ""
    aliases: tuple[str, ...] = ()
    sampled: Mapping[str, WireLimits] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A request whose key has been checked, with its whole body."""

    http: Request
    caller: Caller
    body: bytes
    readers: Readers

    async def read(self, read: Callable[[bytes], T]) -> T:
        """Apply a function to the body; a large body is parsed off the event loop."""
        return read(self.body) if len(self.body) <= SMALL_BYTES else await self.beside(read, self.body)

    async def json(self, kind: type[T]) -> T:
        """Parse the body as JSON of this kind; raises the errors of `read_json`."""
        return await self.read(lambda body: read_json(kind, body))

    async def beside(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return the result of a function, run off the event loop."""
        return await self.readers.run(self.caller.owner, function, *args, **kwargs)

    def param(self, name: str) -> str:
        """Return a parameter of the path."""
        return self.http.path_params[name]


Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """An endpoint: method, path and handler.

    Attributes:
        quiet: whether its successes are too frequent to log.
        max_body_bytes: None for the server's limit, in which case bodies may be compressed.
    """

    method: str
    path: str
    handler: Handler
    quiet: bool = False
    max_body_bytes: int | None = MAX_JSON_BYTES


def answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Encode a value as a JSON response."""
    return Response(msgspec.json.encode(value), status_code=status, headers=headers, media_type=_JSON)


def accepted(request_id: str, **more: Any) -> Response:
    """Answer that work continues under this request ID."""
    return answer({"request_id": request_id, **more})


def refusal(sentence: str, *, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with an error in the form that clients expect."""
    return answer({"detail": sentence}, status=status, headers=headers)


def payload(content: Payload) -> Response:
    """Answer with a payload that is already encoded."""
    return Response(content.data, headers={"content-type": content.content_type})
