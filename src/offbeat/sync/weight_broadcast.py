"""The sender's side of weights by broadcast: one version, offered to every engine that comes for it. Used by rank 0 of the trainers.

A `WeightBroadcast` serves a store at an address and runs one thread, which
    consumes   arrivals of receivers in the store
    produces   rounds: a new process group of the sender and all who have arrived, one broadcast of the whole version, and the group's end;
               receivers that have the version before share a round of the changes since then
    waits for  as many receivers as are expected, or until none has come for a moment; then for one round, under a deadline
    woken by   its own clock
A member that dies or hangs breaks its round for all members; the others arrive again and share the next. A receiver that has failed twice
is told to read the version's folder, which is written when the first receiver needs it.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from offbeat.sync.broadcast import BroadcastGroup, Spec, device_name
from offbeat.sync.mesh import host_store
from offbeat.sync.platform import current_platform

_MAX_ROUNDS = 2
_ROUNDS_PER_TIMEOUT = 4
"""Chosen so that two broken rounds and the way through the folder fit into the timeout of the whole."""
_QUIET_S = 0.5
_POLL_S = 0.005
_IDLE_POLL_S = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrival:
    """A receiver that waits for its ticket.

    Attributes:
        attempt: number of rounds it has failed.
        device: name of its accelerator, if any.
        changes: whether it has the version before, and wants only the changes since then.
    """

    number: int
    attempt: int
    device: str
    changes: bool = False


@dataclass(frozen=True, eq=False)
class Changes:
    """Changes since an earlier version: that version's folder, `base`, and CPU tensors by keys of their own."""

    base: str
    tensors: dict[str, Tensor]


class WeightBroadcast:
    """The offer of one version, until it is closed.

    Attributes:
        address: `host:port`, for `sync.broadcast.receive`, such as "127.0.0.1:41873".
        changes_bytes: size of the changes that are offered beside the whole version, at least 1; 0 if there are none.
    """

    def __init__(
        self, state: dict[str, Tensor], *, host: str, num_receivers: int, timeout_s: float,
        write_folder: Callable[[dict[str, Tensor]], None], changes: Changes | None = None,
    ) -> None:
        """Start to serve receivers in the background; returns at once.

        Args:
            state: CPU tensors by name, of any shape such as [V, D], which must not change.
            host: address of this machine, as receivers reach it.
            num_receivers: number of receivers expected for the first round.
            timeout_s: time for one receiver to get the version.
            write_folder: writes the version's folder, for receivers that broadcasts do not reach.
            changes: offered to receivers that have their `base`.

        Raises:
            PortBusyError: no store can be served there.
        """
        self._state = {name: tensor.contiguous() for name, tensor in state.items()}
        self._changed = {} if changes is None else {name: tensor.contiguous() for name, tensor in changes.tensors.items()}
        self.changes_bytes = 0 if changes is None else max(sum(tensor.nbytes for tensor in self._changed.values()), 1)
        self._device = current_platform.device  # read here, since another thread would not know it
        self._expected = num_receivers
        self._round_timeout_s = timeout_s / _ROUNDS_PER_TIMEOUT
        self._write_folder = write_folder
        self._num_rounds = self._num_arrivals = 0
        self._unread: set[int] = set()
        self._folder_ticket: dict[str, str] | None = None
        self._closed = threading.Event()
        self._store = host_store(timeout_s, host=host)
        self._store.set("offer", json.dumps({
            "timeout_s": timeout_s, "tensors": _specs(self._state), "base": "" if changes is None else changes.base,
            "changes": _specs(self._changed)}))
        self.address = f"{host}:{self._store.port}"
        self._thread = threading.Thread(target=self._serve, name="offer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no one after the current round; waiting receivers learn that the offer is gone. Returns at once."""
        self._closed.set()

    def _serve(self) -> None:
        try:
            while arrived := self._gather():
                by_folder = [one for one in arrived if one.attempt >= _MAX_ROUNDS]
                for one in by_folder:
                    self._send_ticket(one, self._by_folder())
                members = [one for one in arrived if one not in by_folder]
                self._expected = 0
                for tensors, alike in (
                    (self._changed, [one for one in members if one.changes]), (self._state, [one for one in members if not one.changes]),
                ):
                    if alike and not self._round(alike, list(tensors.values())):
                        self._expected += len(alike)
        finally:
            del self._store, self._state, self._changed  # waiting receivers learn that the store is gone

    def _gather(self) -> list[Arrival]:
        """Return the receivers that wait for a ticket: all expected ones, or the present ones after a quiet moment; [] once closed."""
        arrived: list[Arrival] = []
        last_came_at = 0.0
        while not self._closed.wait(_POLL_S if arrived or self._expected else _IDLE_POLL_S):
            if new := self._arrivals():
                arrived += new
                last_came_at = time.monotonic()
            if arrived and (len(arrived) >= self._expected or time.monotonic() > last_came_at + _QUIET_S):
                return arrived
        return []

    def _arrivals(self) -> list[Arrival]:
        num_arrivals = self._store.add("arrivals", 0)
        self._unread |= set(range(self._num_arrivals + 1, num_arrivals + 1))
        self._num_arrivals = num_arrivals
        ready = [number for number in sorted(self._unread) if self._store.check([f"arrival/{number}"])]
        self._unread -= set(ready)
        return [Arrival(number, **json.loads(self._store.get(f"arrival/{number}"))) for number in ready]

    def _send_ticket(self, arrival: Arrival, ticket: dict[str, str] | dict[str, str | int | float]) -> None:
        self._store.set(f"ticket/{arrival.number}", json.dumps(ticket))

    def _by_folder(self) -> dict[str, str]:
        if self._folder_ticket is None:
            try:
                self._write_folder(self._state)
                self._folder_ticket = {}
            except (OSError, RuntimeError, ValueError, SafetensorError) as exc:  # the receiver reports it, under its own name
                self._folder_ticket = {"error": f"the broadcast broke {_MAX_ROUNDS} times, and then {type(exc).__name__}: {exc}"}
        return self._folder_ticket

    def _round(self, members: Sequence[Arrival], tensors: Sequence[Tensor]) -> bool:
        """Broadcast tensors, of any shape such as [V, D]; returns whether that succeeded as far as the sender can tell."""
        self._num_rounds += 1
        name, world, timeout_s = f"round-{self._num_rounds}", len(members) + 1, self._round_timeout_s
        device = self._meeting_device([one.device for one in members])
        backend = current_platform.backend if device.type != "cpu" else "gloo"
        for rank, one in enumerate(members, start=1):
            self._send_ticket(one, {"round": name, "backend": backend, "rank": rank, "world": world, "timeout_s": timeout_s})
        try:
            with BroadcastGroup(backend, dist.PrefixStore(name, self._store), rank=0, world=world, timeout_s=timeout_s) as group:
                group.broadcast(tensors, device=device)
                # Data may still be in flight, and would be lost with the connection.
                self._store.wait([f"{name}/left/{rank}" for rank in range(1, world)], timedelta(seconds=timeout_s))
        except RuntimeError as exc:
            log.warning("a broadcast of weights to %d engines broke: %s", len(members), exc)
            return False
        return True

    def _meeting_device(self, names: Sequence[str]) -> torch.device:
        """Return the sender's accelerator if each has one of its own, else the CPU; `names` are receivers' `device_name`s, "" for none."""
        everyones = [device_name(self._device), *names]
        return self._device if all(everyones) and len(set(everyones)) == len(everyones) else torch.device("cpu")


def _specs(tensors: dict[str, Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [astuple(Spec.of(name, tensor)) for name, tensor in tensors.items()]
