"""Types of all handlers: the served models, a checked request, answers as JSON or as a payload, and refusals for errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from offbeat.chat.refusals import Refusal, WriteError, error_response, json_response, param_of
from offbeat.connections import write_detail
from offbeat.data.image_reader import ImageReader
from offbeat.errors import OffbeatError
from offbeat.listening import ReadBody
from offbeat.service.app.readers import SMALL_BYTES, Beside, Readers
from offbeat.service.errors import FailedError, OverLimitError, RequestError
from offbeat.service.types import Caller, Payload
from offbeat.service.wire.json_body import MAX_JSON_BYTES, read_json
from offbeat.service.wire.limits import WireLimits
from offbeat.telemetry.log import current_request

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """The base model, and the limits of requests to it.

    Attributes:
        tokenizer_id: name by which clients load the tokenizer, such as "Qwen/Qwen3-0.6B".
        stable_reinforce: name of the loss that is used for "stable_reinforce"; empty refuses that loss.
        sampled: limits of the models that are only sampled, by name.
        images: reads those of the base model; None where it reads none.
    """

    base_model: str
    tokenizer_id: str
    alpha: float
    limits: WireLimits
    stable_reinforce: str = ""
    aliases: tuple[str, ...] = ()
    sampled: Mapping[str, WireLimits] = field(default_factory=dict)
    images: ImageReader | None = None


@dataclass(frozen=True)
class Call:
    """A request whose key has been checked, with its whole body."""

    http: Request
    caller: Caller
    body: bytes
    readers: Readers

    async def read(self, read: ReadBody[T]) -> T:
        """Apply a function to the body; a large body is parsed off the event loop."""
        return read(self.body) if len(self.body) <= SMALL_BYTES else await self.beside(read, self.body)

    async def json(self, kind: type[T]) -> T:
        """Parse the body as JSON of this kind; raises the errors of `read_json`."""
        return await self.read(lambda body: read_json(kind, body))

    async def beside(self, function: Beside[T], *args: Any, **kwargs: Any) -> T:
        """Return the result of a function, run off the event loop."""
        return await self.readers.run(self.caller.owner, function, *args, **kwargs)

    def param(self, name: str) -> str:
        return self.http.path_params[name]


Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """An endpoint: method, path and handler.

    Attributes:
        quiet: whether its successes are too frequent to log.
        max_body_bytes: None for the server's limit, in which case bodies may be compressed.
        write_error: writes the body of an error, given its sentence and status.
    """

    method: str
    path: str
    handler: Handler
    quiet: bool = False
    max_body_bytes: int | None = MAX_JSON_BYTES
    write_error: WriteError = write_detail


def answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Encode a value as a JSON response."""
    return json_response(msgspec.json.encode(value), status=status, headers=headers)


def accepted(request_id: str, **more: Any) -> Response:
    """Answer that work continues under this request ID."""
    return answer({"request_id": request_id, **more})


def refusal(sentence: str, *, status: int) -> Response:
    """Answer with an error in the form of the service's own endpoints."""
    return error_response(Refusal(sentence, status), write_detail)


def payload(content: Payload) -> Response:
    """Answer with a payload that is already encoded."""
    return Response(content.data, headers={"content-type": content.content_type})


def explain(exc: BaseException, what: str) -> Refusal:
    """Return the refusal for the client of the current request; `what` names the request in the log."""
    request_id = current_request.get()
    match exc:
        case OverLimitError():
            return Refusal(str(exc), exc.status, {"retry-after": f"{exc.retry_after_s:g}"})
        case RequestError() | FailedError():
            return Refusal(str(exc), exc.status, param=param_of(exc))
        case OffbeatError():  # such as a full disk or an unreachable database: it may pass, and clients must not learn where these are
            _log.error("%s failed: %s", what, exc)
            return Refusal(
                f"this server cannot do that for now, and its log says why under {request_id}; send the request again later", 503,
                {"retry-after": "2"})
        case asyncio.CancelledError():
            return Refusal("this server is ending; send the request again to the next one", 503)
        case _:
            _log.error("%s failed", what, exc_info=exc)
            return Refusal(f"this server failed in a way that it did not expect; its log has the reason under {request_id}", 500)
