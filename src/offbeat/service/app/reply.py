"""What handlers are given and what they give back: what is served, a checked request, and answers as JSON or as a payload."""

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
    """The base model and what may be asked of it.

    Attributes:
        tokenizer_id: what clients load the tokenizer by.
        alpha: of every adapter.
        stable_reinforce: the loss that stands in for the one of that name; empty refuses it.
        aliases: other names of the base model.
        sampled: bounds of the models that are only sampled, by name.
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
    """One request whose key has been checked, with its whole body."""

    http: Request
    caller: Caller
    body: bytes
    readers: Readers

    async def read(self, read: Callable[[bytes], T]) -> T:
        """What a function makes of the body; a large one is read beside the event loop."""
        return read(self.body) if len(self.body) <= SMALL_BYTES else await self.beside(read, self.body)

    async def json(self, kind: type[T]) -> T:
        """The body as JSON of this kind; raises what `read_json` does."""
        return await self.read(lambda body: read_json(kind, body))

    async def beside(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """What a function gives, called beside the event loop."""
        return await self.readers.run(self.caller.owner, function, *args, **kwargs)

    def param(self, name: str) -> str:
        """A part of the path."""
        return self.http.path_params[name]


Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """One line of the table of routes.

    Attributes:
        quiet: called so often that its successes are not logged.
        max_body_bytes: None for as many as the server takes at all, which may come packed.
    """

    method: str
    path: str
    handler: Handler
    quiet: bool = False
    max_body_bytes: int | None = MAX_JSON_BYTES


def answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(msgspec.json.encode(value), status_code=status, headers=headers, media_type=_JSON)


def accepted(request_id: str, **more: Any) -> Response:
    """Work goes on under this id."""
    return answer({"request_id": request_id, **more})


def refusal(sentence: str, *, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """An error as clients expect it."""
    return answer({"detail": sentence}, status=status, headers=headers)


def payload(content: Payload) -> Response:
    """An answer that is encoded already."""
    return Response(content.data, headers={"content-type": content.content_type})
