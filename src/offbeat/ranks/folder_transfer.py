"""Sends the folders that a call of the ranks reads, and fetches the ones that it writes, where machines share no disk. Torch-free.

Used by `WorkerRanks`. Folders are sent to the machines of the ranks before the call and fetched after it, each rank's part of them, and
then removed there. Where every rank sees this process's files, nothing happens.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.aio import gather_all
from offbeat.data.model_folder import TOKENIZER_FILES
from offbeat.errors import OffbeatError, StorageError
from offbeat.phase import phase
from offbeat.trainer.messages import ExportRequest, Folder, NewAdapter, WriteRequest, Written
from offbeat.workers.disks import DiskFolder, fetch, place_of, send
from offbeat.workers.worker import Far, Nothing, Worker

_REMOVE_S = 5.0


@dataclass(frozen=True)
class FolderUse:
    """The folders of a call.

    Attributes:
        reads: folders that all ranks read, with patterns of the files that they need, such as "config.json"; () for all files.
        writes: folders that ranks write.
        by_parts: whether each rank writes a part of them; otherwise ranks that see the same disk as rank 0 write all.
    """

    reads: tuple[tuple[Path, tuple[str, ...]], ...] = ()
    writes: tuple[Path, ...] = ()
    by_parts: bool = False

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders that the call reads or writes."""
        return *(folder for folder, _ in self.reads), *self.writes


def use_of(method: str, request: Any) -> FolderUse:
    """Return the folders that a call reads and writes; `method` is its name, or "part.name", such as "critic.save"."""
    match request:
        case Folder() if method.rpartition(".")[2] == "save":
            return FolderUse(writes=(request.folder,), by_parts=not request.name)
        case Folder():
            return FolderUse(reads=((request.folder, ()),))
        case NewAdapter() if request.folder:
            return FolderUse(reads=((Path(request.folder), ()),))
        case WriteRequest() if request.broadcast is None:
            return FolderUse(writes=(Path(request.folder),))
        case ExportRequest():
            tokenizer = Path(request.tokenizer)
            needed = (*TOKENIZER_FILES, "config.json")
            return FolderUse(reads=((tokenizer, needed),) if tokenizer.is_dir() else (), writes=(Path(request.path),))
    return FolderUse()


class FolderTransfer:
    """Sends and fetches the folders of calls, one call after another."""

    def __init__(self, *, shared: Path | None) -> None:
        """`shared` is a folder that all machines see under this path, if there is one."""
        self._shared = None if shared is None else shared.resolve()

    @asynccontextmanager
    async def around(
        self, workers: Sequence[Worker], method: str, requests: Sequence[Any], *, timeout_s: float,
    ) -> AsyncIterator[list[Any]]:
        """Yield the requests with each rank's own paths; the body makes the call.

        All `requests`, one for each worker, name the same folders. `timeout_s` is for each of sending and fetching.

        Raises:
            StorageError: a disk fails, or a file has not come as it was sent. WorkerError, DeathError: a machine is gone.
            DeadlineError: it took too long.
        """
        disks = {worker.disk.name: worker.disk for worker in workers if worker.disk is not None}
        if not disks:
            yield list(requests)
            return
        use, all_far = self._travelling(use_of(method, requests[0])), all(worker.disk is not None for worker in workers)
        try:
            if use.reads:
                with phase(f"sending {', '.join(folder.name for folder, _ in use.reads)} to the train ranks"):
                    await gather_all(
                        send(folder, disk, only=only, timeout_s=timeout_s) for folder, only in use.reads for disk in disks.values())
            yield [self._placed(request, worker.disk, keeps=first) for request, worker, first in zip(
                requests, workers, _firsts(workers), strict=True)]
            for folder in use.writes:
                with phase(f"fetching {folder.name} from the train ranks"):
                    await self._fetch(folder, list(disks.values()), all_far=all_far, by_parts=use.by_parts, timeout_s=timeout_s)
        finally:
            await _clear(list(disks.values()), use.folders)

    def answers(self, requests: Sequence[Any], answers: list[Any]) -> list[Any]:
        """Return the answers with the folders of the requests, instead of the ranks' own paths."""
        return [
            replace(answer, base=request.base) if isinstance(answer, Written) and answer.base else answer
            for request, answer in zip(requests, answers, strict=True)]

    def _travelling(self, use: FolderUse) -> FolderUse:
        return FolderUse(
            tuple((folder, only) for folder, only in use.reads if not self._is_shared(folder)),
            tuple(folder for folder in use.writes if not self._is_shared(folder)), by_parts=use.by_parts)

    async def _fetch(self, folder: Path, disks: Sequence[Far], *, all_far: bool, by_parts: bool, timeout_s: float) -> None:
        num_files = await fetch(folder, disks, merge=by_parts and not all_far, timeout_s=timeout_s)
        if all_far and not num_files:
            raise StorageError(f"no train rank has written {folder}, though all were asked to; see their logs")

    def _is_shared(self, folder: Path) -> bool:
        return self._shared is not None and folder.resolve().is_relative_to(self._shared)

    def _placed(self, request: Any, disk: Far | None, *, keeps: bool) -> Any:
        """Return a request with the rank's own paths; `keeps` is whether the rank is the first one on its disk."""
        def at(folder: str) -> str:
            return folder if disk is None or not folder or self._is_shared(Path(folder)) else disk.path(place_of(Path(folder)))

        match request:
            case Folder():
                return replace(request, path=at(request.path), keeps=keeps)
            case NewAdapter():
                return replace(request, folder=at(request.folder))
            case WriteRequest() if request.broadcast is not None:  # engines know versions by these names
                seen = disk is None or self._is_shared(Path(request.folder))
                return replace(request, broadcast=replace(request.broadcast, by_folder=seen))
            case WriteRequest():
                return replace(request, folder=at(request.folder), base=at(request.base))
            case ExportRequest():
                tokenizer = at(request.tokenizer) if Path(request.tokenizer).is_dir() else request.tokenizer
                return replace(request, path=at(request.path), tokenizer=tokenizer)
        return request


def _firsts(workers: Sequence[Worker]) -> list[bool]:
    """Return for each worker whether it is the first on its disk, e.g. [True, False] for two on one disk."""
    names = [worker.disk.name if worker.disk is not None else "" for worker in workers]
    return [names.index(name) == index for index, name in enumerate(names)]


async def _clear(disks: Sequence[Far], folders: Sequence[Path]) -> None:
    async def remove_folder(disk: Far, folder: Path) -> None:
        with suppress(OffbeatError):  # the scratch folder is removed in the end, and machines that are gone keep nothing
            await disk.ask("remove", DiskFolder(place_of(folder)), Nothing, timeout_s=_REMOVE_S)

    await asyncio.gather(*(remove_folder(disk, folder) for disk in disks for folder in folders))
