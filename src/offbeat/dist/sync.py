"""Named waits of all ranks, each with a deadline: used around saving, exporting and evaluating.

The deadline lies outside the collective, so a missed one leaves the group usable: the late rank still completes it.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from offbeat.dist.mesh import ProcessGroups
from offbeat.dist.platform import current_platform
from offbeat.errors import DeadlineError, WorkerError


def barrier(name: str, *, groups: ProcessGroups, timeout_s: float) -> None:
    """Return when this rank's device is idle and every rank has come to the point `name`.

    Raises:
        DeadlineError: some rank did not come within `timeout_s` seconds.
        WorkerError: some rank's process is gone.
    """
    current_platform.synchronize()
    started = time.monotonic()
    work = dist.all_reduce(torch.zeros(1), group=groups.cpu_group, async_op=True)
    assert work is not None, "an asynchronous collective returns its work"
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as exc:
        # gloo raises the same type for both; only a missed deadline takes the whole time.
        if time.monotonic() - started < timeout_s:
            raise WorkerError(f"rank {groups.rank} lost a peer at {name!r}: {exc}") from exc
        raise DeadlineError(
            f"rank {groups.rank} of {groups.world} waited {timeout_s:g} s at {name!r} and some rank has not come; "
            "look at the other ranks' logs, or raise the deadline of this point if they are only slow") from exc
