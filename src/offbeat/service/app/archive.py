"""Serves an adapter as one tar file, created while it is sent. SDKs before 0.36 download it by a link that needs no key."""

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from offbeat.errors import StorageError
from offbeat.service.app.links import Links
from offbeat.service.app.reply import Call, Endpoint, answer, refusal
from offbeat.service.errors import RequestError
from offbeat.service.library import Library
from offbeat.service.types import Caller
from offbeat.service.wire import rest

_COMPLETE = "checkpoint_complete"
"""Name of an empty file, by which clients see that the archive is complete."""
_ABOUT = "adapter_config.json"
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class _Archive:
    """An adapter, and the caller who asked for its link. If the adapter is replaced under the same name, its files differ."""

    caller: Caller
    path: str
    files: tuple[tuple[str, Path], ...]


class Archives:
    """Unguessable links to archives. A link is valid for an hour, as long as its requester may read the adapter."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._links: Links[_Archive] = Links()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("GET", "/api/v1/training_runs/{run}/checkpoints/{segment}/{name}/archive", self._make)

    @property
    def route(self) -> Route:
        return Route("/api/v1/archives/{token}.tar", self._fetch)

    async def _make(self, call: Call) -> Response:
        path = f"tinker://{call.param('run')}/{call.param('segment')}/{call.param('name')}"
        files, _ = await asyncio.to_thread(self._library.adapter_files, call.caller, path)
        token, expires = self._links.add(_Archive(call.caller, path, tuple(files.items())))
        return answer(rest.archive_url(f"{call.http.base_url}api/v1/archives/{token}.tar", expires=expires))

    async def _fetch(self, http: Request) -> Response:
        archive = self._links.find(http.path_params["token"])
        try:
            if archive is not None:
                files, base_model = await asyncio.to_thread(self._library.adapter_files, archive.caller, archive.path)
                if tuple(files.items()) == archive.files:
                    return stream(files, base_model=base_model)
        except (RequestError, StorageError, OSError):
            pass  # the adapter was deleted, replaced, made private or damaged
        return refusal("there is no such archive, or its link has ended; ask for it again", status=404)


def stream(files: Mapping[str, Path], *, base_model: str) -> StreamingResponse:
    """Stream the files of an adapter, in which the base model has its name for clients; raises OSError if a file cannot be read."""
    with ExitStack() as opened:
        parts: dict[str, io.BufferedIOBase] = {name: opened.enter_context(path.open("rb")) for name, path in files.items()}
        stack = opened.pop_all()
    if (about := parts.get(_ABOUT)) is not None:  # clients must not learn where the trainers have the base model
        named = json.loads(about.read()) | {"base_model_name_or_path": base_model}
        parts[_ABOUT] = io.BytesIO(json.dumps(named, indent=2).encode())
    parts[_COMPLETE] = io.BytesIO()
    sizes = {name: part.seek(0, io.SEEK_END) for name, part in parts.items()}
    for part in parts.values():
        part.seek(0)
    total = sum(tarfile.BLOCKSIZE + _padded(size) for size in sizes.values()) + 2 * tarfile.BLOCKSIZE

    async def pieces() -> AsyncIterator[bytes]:
        with stack:
            for name, part in parts.items():
                info = tarfile.TarInfo(name)
                info.size = sizes[name]
                yield info.tobuf(tarfile.USTAR_FORMAT)
                while piece := await asyncio.to_thread(part.read, _PIECE_BYTES):
                    yield piece
                yield bytes(_padded(sizes[name]) - sizes[name])
            yield bytes(2 * tarfile.BLOCKSIZE)

    return StreamingResponse(pieces(), media_type="application/x-tar", headers={"content-length": str(total)})


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
