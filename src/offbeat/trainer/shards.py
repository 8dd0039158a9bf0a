"""Checkpoints to resume from: each rank writes its share of weights and optimizer state, whatever the strategy.

Called by the trainer on all ranks at once. A checkpoint can be loaded with another number of ranks and another strategy. It is written
beside its final name and renamed when every rank is done, so a crash or a full disk leaves the previous contents intact. Loading never
executes anything from a checkpoint, wherever it came from.
"""

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from offbeat.disk import discard, put_in_place
from offbeat.errors import RunError, StorageError
from offbeat.pulse import progress
from offbeat.sync.mesh import ProcessGroups
from offbeat.trainer.metadata import SafePlanner, SafeReader


def save_state(folder: Path, state: dict[str, Any], *, groups: ProcessGroups, keeps: bool = False) -> None:
    """Write weights, optimizer state and the step to `folder`, replacing an earlier state; a collective call.

    Args:
        state: values under "model", "optimizer" and "step", and further values to be read again; tensors may be in shards.
        keeps: whether this rank renames `folder` on its machine where rank 0 does not see it; then that holds the part of its ranks.

    Raises:
        StorageError: on every rank, when some rank could not write; `folder` is unchanged.
    """
    part = folder.with_name(folder.name + ".part")
    leads = groups.rank == 0 or keeps
    if leads:
        # No rank writes before all have planned, which happens after this.
        discard(part)
    failure = None
    with groups.sync.region("save_recover"):
        progress("write_checkpoint")
        try:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(part), process_group=groups.cpu_group)
        except CheckpointException as exc:  # raised on every rank if on any, so no rank fails alone
            failure = exc
    if failure:
        if leads:
            discard(part)
        raise _describe(failure, folder, "written; what was saved before is intact") from failure
    error = _replace(part, folder) if leads else None
    if groups.sync.sum_scalars("save_recover_done", {"failed": error is not None})["failed"]:
        raise StorageError(f"checkpoint {folder} could not be put in place: {error or 'see the logs of the ranks'}") from error


def load(folder: Path, state: dict[str, Any], *, groups: ProcessGroups) -> dict[str, Any]:
    """Overwrite `state` from the files of `save`, and return it; collective. If any rank cannot read, all raise StorageError."""
    missing = not (folder / ".metadata").is_file()
    if num_missing := int(groups.sync.sum_scalars("load_recover", {"missing": missing})["missing"]):
        raise StorageError(
            f"{num_missing} of {groups.world} ranks find no checkpoint in {folder}; it must lie on a disk that all ranks see")
    failure = None
    with groups.sync.region("load_recover_read"):
        progress("read_checkpoint")
        try:
            dcp.load(state, storage_reader=SafeReader(folder), planner=SafePlanner(), process_group=groups.cpu_group)
        except CheckpointException as exc:
            failure = exc
    if failure:
        raise _describe(failure, folder, "read") from failure
    return state


def holds(folder: Path, key: str) -> bool:
    """Tell whether the checkpoint has values under a key. Not collective; one that cannot be read has none, and `load` says why."""
    try:
        names = SafeReader(folder).read_metadata().state_dict_metadata
    except (OSError, StorageError):
        return False
    return any(name.startswith(f"{key}.") for name in names)


def _replace(part: Path, folder: Path) -> OSError | None:
    try:
        put_in_place(part, folder)
    except OSError as exc:
        return exc
    return None


def _describe(exc: CheckpointException, folder: Path, outcome: str) -> StorageError | RunError:
    failures = {rank: failure[0] for rank, failure in exc.failures.items()}
    reasons = "; ".join(f"rank {rank}: {_reason(failure)}" for rank, failure in sorted(failures.items()))
    # When a write fails inside torch's archive writer, the error is the writer's complaint about its own position.
    of_disk = any(isinstance(failure, OSError) or "inline_container" in str(failure) for failure in failures.values())
    kind = StorageError if of_disk else RunError
    return kind(f"checkpoint {folder} could not be {outcome} ({reasons})")


def _reason(failure: BaseException) -> str:
    return "a file could not be written to its end; is the disk full?" if "inline_container" in str(failure) else str(failure)
