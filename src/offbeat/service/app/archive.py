"""An adapter as one tar file, made while it is sent: what SDKs before 0.36 download. Called by `routes_rest`."""

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from starlette.responses import StreamingResponse

NAME = "archive.tar"
_COMPLETE = "checkpoint_complete"
"""An empty file by which clients see that nothing is missing."""
_ABOUT = "adapter_config.json"
_PIECE_BYTES = 1 << 20


def stream(files: Mapping[str, Path], *, base_model: str) -> StreamingResponse:
    """The files of an adapter, with its base named as clients name it, as an answer.

    Raises:
        OSError: one cannot be read.
    """
    stack = ExitStack()
    try:
        parts: dict[str, io.BufferedIOBase] = {name: stack.enter_context(path.open("rb")) for name, path in files.items()}
    except OSError:
        stack.close()
        raise
    if (about := parts.get(_ABOUT)) is not None:  # where the trainers have the base is no business of theirs
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
