"""Writes a version by several ranks: each writes whole tensors to a file of its own, so that none gathers the others' tensors.

Called by `ModelTrainer` on all ranks at once, where weights are in shards and go to a folder. Rank 0 makes a folder beside the version's,
adds the small files when all have written, and renames it: so the version appears complete or not at all. Ranks that do not see that
folder, because they are on other machines and it is in memory, write nothing. Any error of a disk is told at a sync point, and rank 0
raises it after the last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from offbeat.data.wire import decode, encode
from offbeat.disk import discard, put_in_place
from offbeat.errors import StorageError
from offbeat.model.changes_io import changes_file, find_changes, save_changes
from offbeat.model.fingerprint import combine
from offbeat.model.hf_io import check_room, save_weights, weight_file, without_tied
from offbeat.sync.mesh import ProcessGroups
from offbeat.trainer.export import complete_folder
from offbeat.trainer.messages import WriteRequest, Written
from offbeat.trainer.snapshots import ModelSnapshot
from offbeat.trainer.weight_exchange import WeightExchange


@dataclass(frozen=True)
class Target:
    """Rank 0's message to the others about the next version: in SPMD mode only it knows the request.

    Attributes:
        folder: the version's folder; empty if rank 0 offers the weights by itself.
        base: folder of the version written last, if the changes since are enough.
        error: why there is nowhere to write.
    """

    folder: str = ""
    base: str = ""
    error: str = ""

    @property
    def staging(self) -> Path:
        """Folder in which the version is built."""
        return Path(self.folder).with_name(f".{Path(self.folder).name}.parts")


@dataclass(frozen=True)
class Share:
    """One rank's part of a written version.

    Attributes:
        file: name of its file; empty if it had nothing to write.
        names: published names of the weights in it, if it holds whole ones.
        digests: of all weights that the rank was dealt; see `offbeat.model.fingerprint`.
    """

    file: str
    names: tuple[str, ...]
    digests: dict[str, bytes]
    num_bytes: int
    error: str = ""


class PartWriter:
    """Writes versions of one model."""

    def __init__(self, like: ModelSnapshot, exchange: WeightExchange, groups: ProcessGroups, *, timeout_s: float, keeps_last: bool) -> None:
        """`like` is the model to write; its state is not used. A rank has `timeout_s` to write its part, which it `keeps_last` because the
        next version may be written as its changes.
        """
        self._like = like
        self._exchange = exchange
        self._groups = groups
        self._timeout_s = timeout_s
        self._keeps_last = keeps_last
        self._last: tuple[str, ModelSnapshot] | None = None

    def write(self, request: WriteRequest) -> Written | None:
        """Write the weights to rank 0's folder; collective.

        Returns:
            The written version, on rank 0; None, on all ranks, if rank 0 is to offer the weights by broadcast.

        Raises:
            StorageError: on rank 0, after the last collective: the folder could not be written; nothing is left of it.
        """
        sync, rank = self._groups.sync, self._groups.rank
        last, self._last = self._last, None
        target = decode(Target, sync.broadcast("publish_folder", encode(self._open(request)) if rank == 0 else None))
        if target.error:
            return self._failed(target.error)
        if not target.folder:
            return None
        sees = sync.gather("publish_writers", target.staging.is_dir())
        owners = [rank for rank, seen in enumerate(sees) if seen]
        plan = self._exchange.plan(request.dtype, owners)
        with sync.region("publish"):
            snapshot = replace(self._like, state=self._exchange.state(request.dtype, owners), dtype=request.dtype)
        writers = [rank for rank in owners if plan.names(rank)]
        changes = self._find_changes(snapshot, last, target.base)
        share = self._write_share(snapshot, changes, target, writers)
        shares = sync.gather("publish_written", share, timeout_s=self._timeout_s)
        if self._keeps_last and not any(one.error for one in shares):
            self._last = target.folder, snapshot
        if rank != 0:
            return Written("", ())
        written = self._complete(target, shares, snapshot, by_changes=changes is not None)
        return written if changes is None else replace(written, base=request.base)

    def _open(self, request: WriteRequest) -> Target:
        if request.broadcast is not None:
            return Target()
        target = Target(str(Path(request.folder).absolute()), str(Path(request.base).absolute()) if request.base else "")
        try:
            discard(target.staging)
            target.staging.mkdir(parents=True)
            check_room(target.staging, self._exchange.num_bytes(request.dtype))
        except OSError as exc:
            discard(target.staging)
            return Target(error=str(exc) if isinstance(exc, StorageError) else _unwritable(target, str(exc)))
        return target

    def _find_changes(self, snapshot: ModelSnapshot, last: tuple[str, ModelSnapshot] | None, base: str) -> dict[str, Tensor] | None:
        """Return this rank's changes ("at:NAME" [N] uint8), if over all ranks they are smaller than the weights; collective."""
        if not base:
            return None
        found = find_changes(snapshot.published(), since=last[1].published()) if last is not None and last[0] == base else None
        sums = self._groups.sync.sum_scalars(
            "publish_changes", {"lacking": found is None, "changed": _size(found or {}), "all": snapshot.num_bytes})
        return found if not sums["lacking"] and sums["changed"] < sums["all"] else None

    def _write_share(self, snapshot: ModelSnapshot, changes: dict[str, Tensor] | None, target: Target, writers: Sequence[int]) -> Share:
        if self._groups.rank not in writers:
            return Share("", (), {}, 0)
        number = writers.index(self._groups.rank) + 1
        digests, state = snapshot.digests(), without_tied(snapshot.published(), snapshot.model_folder) if changes is None else {}
        file = weight_file(number, len(writers)) if changes is None else changes_file(number, len(writers))
        share = Share(file, tuple(state), digests, snapshot.num_bytes if changes is None else _size(changes))
        try:
            if changes is None:
                save_weights(state, target.staging / file)
            else:
                save_changes(changes, target.staging / file, base=Path(target.base))
        except (OSError, SafetensorError) as exc:
            return replace(share, error=str(exc))
        return share

    def _complete(self, target: Target, shares: Sequence[Share], snapshot: ModelSnapshot, *, by_changes: bool) -> Written:
        """Put the version in place, on rank 0; the answer lacks its base."""
        num_bytes = sum(share.num_bytes for share in shares)
        try:
            if errors := "; ".join(f"rank {rank}: {share.error}" for rank, share in enumerate(shares) if share.error):
                raise StorageError(_unwritable(target, errors))
            if by_changes:
                put_in_place(target.staging, Path(target.folder))
            else:
                complete_folder(
                    target.staging, Path(target.folder), weight_map={name: share.file for share in shares for name in share.names},
                    num_bytes=num_bytes, model_folder=snapshot.model_folder, dtype=snapshot.dtype)
        except OSError as exc:
            raise exc if isinstance(exc, StorageError) else StorageError(_unwritable(target, str(exc))) from exc
        finally:
            discard(target.staging)
        fingerprint = combine({name: digest for share in shares for name, digest in share.digests.items()})
        return Written(fingerprint, (), num_bytes=max(num_bytes, 1))

    def _failed(self, error: str) -> Written:
        if self._groups.rank == 0:
            raise StorageError(error)
        return Written("", ())


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _unwritable(target: Target, reason: str) -> str:
    return f"the model could not be written to {target.folder}: {reason}; free space or choose another folder"
