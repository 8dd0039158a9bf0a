"""Endpoints over runs, checkpoints and sessions, as used by the SDK's RestClient and command line. All of them answer at once."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from offbeat.service.app.links import Links
from offbeat.service.app.reply import Call, Endpoint, answer, refusal
from offbeat.service.errors import BadRequestError, RequestError
from offbeat.service.service import ServiceCore
from offbeat.service.types import Caller, CheckpointInfo, ModelInfo
from offbeat.service.wire import rest
from offbeat.service.wire.bodies import CopyWeightsBody, TtlBody, WeightsInfoBody

FolderOf = Callable[[Caller, str], str]
"""Returns the folder of the export at a path, for a caller; raises RequestError if there is none for that caller."""

_FULL = re.compile(r"(\d{1,4})\.(\d{1,4})(?:[.\-+a-z].*)?")
_AGENT = re.compile(r"AsyncTinker/Python (.+)")
_EXTERNAL_SINCE = (0, 28)
_RUN = "/api/v1/training_runs/{run}"
_CHECKPOINT = _RUN + "/checkpoints/{segment}/{name}"
_MAX_PAGE = 1000


class RestRoutes:
    def __init__(self, service: ServiceCore, exports: "Exports") -> None:
        self._service = service
        self._library = service.library
        self._exports = exports

    @property
    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/training_runs", self._runs),
            Endpoint("GET", _RUN, self._show_run),
            Endpoint("GET", _RUN + "/checkpoints", self._checkpoints_of_run),
            Endpoint("GET", "/api/v1/checkpoints", self._checkpoints),
            Endpoint("DELETE", _CHECKPOINT, self._delete),
            Endpoint("POST", _CHECKPOINT + "/publish", self._publish),
            Endpoint("DELETE", _CHECKPOINT + "/publish", self._unpublish),
            Endpoint("PUT", _CHECKPOINT + "/ttl", self._set_ttl),
            Endpoint("GET", _CHECKPOINT + "/external_weights_urls", self._urls),
            Endpoint("POST", "/api/v1/weights_info", self._weights_info),
            Endpoint("POST", "/api/v1/copy_weights", self._copy),
            Endpoint("GET", "/api/v1/sessions", self._sessions),
            Endpoint("GET", "/api/v1/sessions/{session}", self._session),
        ]

    async def _runs(self, call: Call) -> Response:
        limit, offset = _page(call, default=20)
        infos, total = self._library.runs(call.caller, limit=limit, offset=offset, accessible=_accessible(call))
        runs = [self._run_answer(call, info) for info in infos]
        return answer(rest.training_runs(runs, limit=limit, offset=offset, total=total))

    async def _show_run(self, call: Call) -> Response:
        info = self._library.run_info(call.caller, call.param("run"), accessible=_accessible(call))
        return answer(self._run_answer(call, info))

    def _run_answer(self, call: Call, info: ModelInfo) -> rest.Answer:
        """Describe a run with its latest checkpoints for training and for sampling."""
        newest = self._library.newest_checkpoints(call.caller, info.model_id)
        return rest.training_run(info, last_checkpoint=newest.get("training"), last_sampler_checkpoint=newest.get("sampler"))

    async def _checkpoints_of_run(self, call: Call) -> Response:
        infos, total = self._library.list_checkpoints(call.caller, run_id=call.param("run"), exports=knows_external(call.http.headers))
        return await _listed(call, infos, limit=total, offset=0, total=total)

    async def _checkpoints(self, call: Call) -> Response:
        limit, offset = _page(call, default=100)
        infos, total = self._library.list_checkpoints(call.caller, limit=limit, offset=offset, exports=knows_external(call.http.headers))
        return await _listed(call, infos, limit=limit, offset=offset, total=total)

    async def _delete(self, call: Call) -> Response:
        await self._library.delete_checkpoint(call.caller, _path(call))
        self._exports.end_links(_path(call))
        return Response(status_code=204)

    async def _publish(self, call: Call) -> Response:
        await self._library.set_public(call.caller, _path(call), public=True)
        return Response(status_code=204)

    async def _unpublish(self, call: Call) -> Response:
        await self._library.set_public(call.caller, _path(call), public=False)
        self._exports.end_links(_path(call))
        return Response(status_code=204)

    async def _set_ttl(self, call: Call) -> Response:
        await self._library.set_ttl(call.caller, _path(call), (await call.json(TtlBody)).ttl_seconds)
        return Response(status_code=204)

    async def _urls(self, call: Call) -> Response:
        path = _path(call)
        folder = self._library.external_folder(call.caller, path)
        files = await asyncio.to_thread(self._library.external_files, call.caller, path)
        token, expires = self._exports.link(LinkedExport(call.caller, path, folder, files))
        base = f"{call.http.base_url}api/v1/external/{token}"
        return answer(rest.external_weights_urls({name: f"{base}/{name}" for name in files}, expires=expires))

    async def _weights_info(self, call: Call) -> Response:
        base_model, lora = self._library.weights_info(call.caller, (await call.json(WeightsInfoBody)).tinker_path)
        return answer(rest.weights_info(base_model, lora))

    async def _copy(self, call: Call) -> Response:
        body = await call.json(CopyWeightsBody)
        assert body.session_id is not None and body.model_seq_id is not None, "checked when the body was read"
        path = await self._library.copy_weights(
            call.caller, path=body.source_path, session_id=body.session_id, model_seq_id=body.model_seq_id, ttl_s=body.ttl_seconds)
        return answer({"tinker_path": path})

    async def _sessions(self, call: Call) -> Response:
        limit, offset = _page(call, default=20)
        return answer({"sessions": self._service.list_sessions(call.caller, limit=limit, offset=offset)})

    async def _session(self, call: Call) -> Response:
        return answer(rest.session(self._service.session_info(call.caller, call.param("session"))))


@dataclass(frozen=True)
class LinkedExport:
    """An export, its files, and the caller who asked for its link; one that replaces another under the same name has another folder."""

    caller: Caller
    path: str
    folder: str
    files: Mapping[str, Path] = field(compare=False)


class Exports:
    """Links to exported files. A link is valid while its requester may read the export, and ends when that is unpublished or deleted."""

    def __init__(self, folder_of: FolderOf) -> None:
        self._folder_of = folder_of
        self._links: Links[LinkedExport] = Links()

    def link(self, export: LinkedExport) -> tuple[str, float]:
        """Return a token for an export, and its expiry in seconds since the epoch."""
        return self._links.add(export)

    def end_links(self, path: str) -> None:
        self._links.end_links(lambda export: export.path == path)

    @property
    def route(self) -> Route:
        return Route("/api/v1/external/{token}/{name:path}", self._fetch)

    def find_file(self, token: str, name: str) -> Path | None:
        """Return the file that a link refers to, or None if the link is not valid."""
        export = self._links.find(token)
        return export.files.get(name) if export is not None and self._stands(export) else None

    def _stands(self, export: LinkedExport) -> bool:
        try:
            return self._folder_of(export.caller, export.path) == export.folder
        except RequestError:
            return False

    async def _fetch(self, http: Request) -> Response:
        path = self.find_file(http.path_params["token"], http.path_params["name"])
        if path is None or not path.is_file():
            return refusal("there is no such file, or its link has ended; ask for external_weights_urls again", status=404)
        return FileResponse(path)


async def _listed(call: Call, infos: Sequence[CheckpointInfo], *, limit: int, offset: int, total: int) -> Response:
    """Answer with a page of checkpoints; a long one is written off the event loop."""
    def write() -> Response:
        return answer(rest.checkpoints(infos, limit=limit, offset=offset, total=total))

    return write() if len(infos) <= _MAX_PAGE else await call.beside(write)


def _path(call: Call) -> str:
    return f"tinker://{call.param('run')}/{call.param('segment')}/{call.param('name')}"


def _accessible(call: Call) -> bool:
    return call.http.query_params.get("access_scope", "owned") == "accessible"


def _page(call: Call, *, default: int) -> tuple[int, int]:
    """Return `limit` and `offset` of the query."""
    found = []
    for name, value in (("limit", default), ("offset", 0)):
        text = call.http.query_params.get(name, str(value))
        if not (text.isascii() and text.isdecimal() and len(text) <= 12):
            raise BadRequestError(f"{name} must be a whole number of at least 0, got {text[:40]!r}")
        found.append(int(text))
    return min(found[0], _MAX_PAGE), found[1]


def sdk_version(headers: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the first two numbers of the SDK's version, such as (0, 28), or None if the client is not the SDK or does not say."""
    agent = _AGENT.fullmatch(headers.get("user-agent", ""))
    said = _FULL.fullmatch(headers.get("x-sdk-version") or (agent[1] if agent else ""))
    return (int(said[1]), int(said[2])) if said else None


def knows_external(headers: Mapping[str, str]) -> bool:
    """Whether the client can read a list that contains exports; SDKs before 0.28 fail at the first."""
    version = sdk_version(headers)
    return version is None or version >= _EXTERNAL_SINCE
