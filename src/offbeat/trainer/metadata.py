"""Reads torch's distributed checkpoints without executing code that a stranger may have put into one. Used by `shards`.

Their `.metadata` is a pickle, and so are the numbers beside tensors, which torch loads without restriction. Here only the classes that
torch itself writes are allowed.
"""

import io
import pathlib
import pickle
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import filesystem as _files
from torch.distributed.checkpoint import metadata as _metadata
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from offbeat.errors import StorageError
from offbeat.user_code.boundary import Caught

_ALLOWED = {(kind.__module__, kind.__qualname__): kind for kind in (
    _metadata.Metadata, _metadata.MetadataIndex, _metadata.StorageMeta, _metadata.TensorStorageMetadata, _metadata.TensorProperties,
    _metadata.ChunkStorageMetadata, _metadata.BytesStorageMetadata, _metadata._MEM_FORMAT_ENCODING, _files._StorageInfo, torch.Size,
    torch.serialization._get_layout)}
_PATHS = ("pathlib", "pathlib._local")


class _Unpickler(pickle.Unpickler):
    """Accepts the classes that torch writes, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (known := _ALLOWED.get((module, name))) is not None:
            return known
        if module in _PATHS and name in ("PosixPath", "WindowsPath", "Path"):
            return pathlib.PurePosixPath
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is in no checkpoint")


class SafeReader(FileSystemReader):
    """Reads a folder written by torch."""

    def read_metadata(self, *_: Any, **kwargs: Any) -> Metadata:
        """Read the checkpoint's description of its contents; raises StorageError if it is unreadable, or has more than torch writes."""
        path = pathlib.Path(str(self._get_metadata_path(kwargs.get("rank"))))
        metadata: Any = None
        with Caught(passes=(OSError,)) as caught:  # a damaged pickle can raise anything
            metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
            if not isinstance(metadata, Metadata):
                raise TypeError(f"it holds a {type(metadata).__name__}")
            for place in metadata.storage_data.values():
                if PurePath(place.relative_path).name != place.relative_path:
                    raise ValueError(f"it names the file {place.relative_path!r}")
        if (exc := caught.error) is not None:
            raise StorageError(f"{path} is not a description of a checkpoint, or it is damaged: {exc}; nothing in it was executed") from exc
        metadata.storage_meta = metadata.storage_meta or _metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Loads numbers and strings beside the tensors, and nothing executable."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one such value; raises torch's errors if it is anything else."""
        plain = torch.load(value, weights_only=True)
        super().load_bytes(read_item, io.BytesIO(_saved(plain)))


def _saved(value: Any) -> bytes:
    """Serialise a checked value again, because torch's planner loads any pickle: it only ever sees our own bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
