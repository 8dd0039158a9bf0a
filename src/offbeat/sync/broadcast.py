"""The receiver's side of weights by broadcast: it gets a version that a sender (`sync.weight_broadcast`) offers at an address.

Called by engines, on any thread; needs only torch and the standard library, so that it also runs inside another engine's process.
Receivers arrive at the sender's store and get a ticket: a place in a process group for one round of broadcasts, or the instruction to read
the version's folder instead. A receiver that has the version before may take part in a round of the changes since then. When a round
breaks, because a member died or hangs, all members drop it and the remaining ones arrive again. Every wait has a deadline.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from math import prod
from threading import Thread
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 32 << 20
_CONNECT_TIMEOUT_S = 10.0
_POLL_S = 0.0005
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True)
class Spec:
    """Name, shape and dtype of one tensor of a version; `dtype` is torch's name, such as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Spec":
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch.dtype of that name; raises ValueError if there is none."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.name!r} was offered as {self.dtype!r}, which is not a torch type")
        return dtype

    @property
    def num_bytes(self) -> int:
        """Size of the tensor. Raises as `torch_dtype`."""
        return prod(self.shape) * self.torch_dtype.itemsize


def cut(tensors: Iterable[Tensor], *, bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Cut the bytes of contiguous tensors, in order, into lists of [B] uint8 views, `bucket_bytes` per list but the last.

    For example, tensors of 5 and 3 bytes in buckets of 4 give two lists: one view of 4 bytes, then views of 1 and 3.
    """
    bucket: list[Tensor] = []
    room = bucket_bytes
    for tensor in tensors:
        rest = tensor.view(-1).view(torch.uint8)
        while len(rest):
            part, rest = rest[:room], rest[room:]
            bucket.append(part)
            room -= len(part)
            if not room:
                yield bucket
                bucket, room = [], bucket_bytes
    if bucket:
        yield bucket


def device_name(device: torch.device) -> str:
    """Name an accelerator uniquely among all machines; empty for a CPU, or where it has no such name."""
    return "" if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)


class BroadcastGroup:
    """A process group for one round, independent of any other that this process has.

    >>> with BroadcastGroup("gloo", store, rank=0, world=3, timeout_s=15) as group:
    ...     group.broadcast(tensors, device=torch.device("cpu"))
    """

    def __init__(self, backend: str, store: dist.Store, *, rank: int, world: int, timeout_s: float) -> None:
        """Join the group; `timeout_s` bounds each bucket, and the arrival of all members; raises RuntimeError if one is missing."""
        self._rank = rank
        self._timeout_s = timeout_s
        self._is_connected = False
        if backend == "nccl":
            with _errors_left_to_us():
                self._group: Any = dist.ProcessGroupNCCL(store, rank, world, dist.ProcessGroupNCCL.Options())
        else:
            self._group = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the connections, by which the other members notice that this one has left."""
        self._group.abort()
        self._group = None  # gloo closes when its last reference goes; an error's traceback must not hold one

    def broadcast(self, tensors: Sequence[Tensor], *, device: torch.device) -> None:
        """Copy the bytes of rank 0's tensors into every member's tensors, bucket by bucket.

        Args:
            tensors: contiguous, of any shapes such as [V, D], on any device; the same dtypes and shapes in the same order on every member.
            device: device on which the group communicates.

        Raises:
            RuntimeError: a member died, did not connect in time, or a bucket was not broadcast in time.
        """
        if not self._is_connected:
            self._connect(device)
        for parts in cut(tensors, bucket_bytes=BUCKET_BYTES):
            if self._rank == 0:
                self._broadcast(torch.cat(parts).to(device))
            else:
                bucket = torch.empty(sum(map(len, parts)), dtype=torch.uint8, device=device)
                self._broadcast(bucket)
                for part, received in zip(parts, bucket.split([len(part) for part in parts]), strict=True):
                    part.copy_(received)

    def _connect(self, device: torch.device) -> None:
        """Broadcast one byte in a thread: NCCL connects its members within the call of the first collective, which has no time-out then."""
        failures: list[RuntimeError] = []

        def meet() -> None:
            try:
                self._broadcast(torch.zeros(1, dtype=torch.uint8, device=device))
            except RuntimeError as exc:
                failures.append(exc)

        thread = Thread(target=meet, name="offbeat-connect", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise RuntimeError(f"the members of a broadcast did not connect within {self._timeout_s:g} s")
        if failures:
            raise RuntimeError(str(failures[0])) from None  # the other has a traceback that holds the group; see __exit__
        self._is_connected = True

    def _broadcast(self, bucket: Tensor) -> None:
        """Broadcast one bucket, [B] uint8, and poll until it is complete.

        `work.wait` alone would with NCCL only queue behind the broadcast, and a hanging one could not be left.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=self._timeout_s)
        give_up_at = time.monotonic() + self._timeout_s
        work = self._group.broadcast([bucket], options)
        try:
            while not work.is_completed():
                if time.monotonic() > give_up_at:
                    raise RuntimeError(f"a bucket of weights was not broadcast within {self._timeout_s:g} s")
                time.sleep(_POLL_S)
            work.wait()
        finally:
            del work  # see __exit__


@contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """Disable torch's watchdog for a new NCCL group: it would end this whole process when another member dies."""
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = "0"
    try:
        yield
    finally:
        os.environ.pop(_NCCL_ERRORS)
        if before is not None:
            os.environ[_NCCL_ERRORS] = before


@dataclass(frozen=True)
class Held:
    """A version that a receiver has already.

    Attributes:
        name: its folder.
        change: applies the sender's changes to this version, and returns the new tensors; None if the changes do not fit.
    """

    name: str
    change: Callable[[dict[str, Tensor]], dict[str, Tensor] | None]


def receive(address: str, *, device: torch.device, held: Held | None = None) -> dict[str, Tensor] | None:
    """Receive the tensors offered at `host:port`, on `device` or the CPU; None where they are to be read from the version's folder.

    Each has the shape of its `Spec`, such as [V, D].

    Of `held`, the receiver's version, only the changes since then are received, if they are offered and fit.

    Raises:
        OSError, RuntimeError: nobody offers them there any more, no ticket came in time, or the sender could not write the folder.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()  # the store itself would retry for long
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_TIMEOUT_S))
    offer = json.loads(store.get("offer"))
    if held is not None and held.name != offer["base"]:
        held = None
    for attempt in count():
        ticket = _arrive(store, attempt, device, timeout_s=offer["timeout_s"], changes=held is not None)
        if "error" in ticket:
            raise RuntimeError(ticket["error"])
        if "rank" not in ticket:
            return None
        specs = [Spec(name, dtype, tuple(shape)) for name, dtype, shape in offer["tensors" if held is None else "changes"]]
        try:
            received = _take_part(store, ticket, specs, device)
        except RuntimeError:  # the group broke; if the store is gone, the next arrival raises
            continue
        if held is None:
            return received
        if (changed := held.change(received)) is not None:
            return changed
        held = None
    raise AssertionError("attempts are counted for ever")


def _arrive(store: dist.Store, attempt: int, device: torch.device, *, timeout_s: float, changes: bool) -> dict[str, Any]:
    number = store.add("arrivals", 1)
    store.set(f"arrival/{number}", json.dumps({"attempt": attempt, "device": device_name(device), "changes": changes}))
    store.wait([f"ticket/{number}"], timedelta(seconds=timeout_s))
    return json.loads(store.get(f"ticket/{number}"))


def _take_part(store: dist.Store, ticket: dict[str, Any], specs: list[Spec], device: torch.device) -> dict[str, Tensor]:
    name, timeout_s = ticket["round"], ticket["timeout_s"]
    place = device if ticket["backend"] == "nccl" else torch.device("cpu")
    state = {spec.name: torch.empty(spec.shape, dtype=spec.torch_dtype, device=place) for spec in specs}
    try:
        members = dist.PrefixStore(name, store)
        with BroadcastGroup(ticket["backend"], members, rank=ticket["rank"], world=ticket["world"], timeout_s=timeout_s) as group:
            group.broadcast(list(state.values()), device=place)
    finally:
        store.set(f"{name}/left/{ticket['rank']}", "")
    return state
