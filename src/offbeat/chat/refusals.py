"""Errors on their way to clients, the same from every server: their statuses, their forms, and paths that a server does not have.

Used by the engine, the service and the proxy of agents. Each declares its differences: a table of statuses (`Refusals`), or the form of
errors outside the APIs of OpenAI and Anthropic (`errors_of`).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from offbeat.chat.anthropic import Anthropic
from offbeat.chat.completions import Completions
from offbeat.errors import RefusedError

GONE = 499
"""Status of a request whose client did not wait for the answer; nobody receives it."""

_log = logging.getLogger(__name__)


class WriteError(Protocol):
    """Writes the body of an error."""

    def __call__(self, message: str, *, status: int, param: str = "") -> bytes: ...


OPENAI: WriteError = Completions().error
ANTHROPIC: WriteError = Anthropic().error


@dataclass(frozen=True)
class Refusal:
    """An error for clients: one sentence, its HTTP status such as 400, headers, and the field that is wrong, or ""."""

    sentence: str
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    param: str = ""


Explain = Callable[[BaseException], Refusal]


@dataclass(frozen=True)
class Refusals:
    """Turns the errors of one server into refusals.

    Attributes:
        who: the server, such as "the engine", whose log has unexpected errors.
        statuses: status of each kind of error; the first that fits counts.
        headers: headers of a status, such as {429: {"Retry-After": "1"}}.
    """

    who: str
    statuses: Mapping[type[BaseException], int]
    headers: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def explain(self, exc: BaseException) -> Refusal:
        """Return the refusal of an error; one that is not in the table is logged, and has status 500."""
        status = next((status for kind, status in self.statuses.items() if isinstance(exc, kind)), None)
        if status is not None:
            return Refusal(str(exc), status, self.headers.get(status, {}), param_of(exc))
        _log.error("a request to %s failed", self.who, exc_info=exc)
        return Refusal(f"unexpected {type(exc).__name__}: {exc}; {self.who}'s log says where", 500)


def param_of(exc: BaseException) -> str:
    """Return the field that is wrong by an error, or by the error behind it; empty if neither names one."""
    return exc.param if isinstance(exc, RefusedError) else exc.__cause__.param if isinstance(exc.__cause__, RefusedError) else ""


def errors_of(path: str, *, own: WriteError = OPENAI) -> WriteError:
    """Return how errors of a path are written: as Anthropic's or OpenAI's API does, or `own` where the path belongs to neither."""
    if "/v1/messages" in path or path.startswith("/anthropic/api/"):
        return ANTHROPIC
    return OPENAI if path.startswith(("/v1/", "/oai/api/")) else own


async def no_such_endpoint(http: Request, exc: Exception, *, own: WriteError = OPENAI) -> Response:
    """Answer to a path or a method that a server does not have; see `errors_of`."""
    status, path = getattr(exc, "status_code", 404), http.url.path
    sentence = f"{path[:200]} does not take {http.method}" if status == 405 else f"this server has no {http.method} {path[:200]}"
    return error_response(Refusal(sentence, status), errors_of(path, own=own))


def error_response(refusal: Refusal, write: WriteError = OPENAI) -> Response:
    """Answer with an error, written in the form of its endpoint."""
    data = write(refusal.sentence, status=refusal.status, param=refusal.param)
    return json_response(data, status=refusal.status, headers=refusal.headers)


def json_response(data: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with JSON that is already encoded."""
    return Response(data, status_code=status, headers=headers, media_type="application/json")
