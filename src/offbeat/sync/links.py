"""A rank's connections to the store, and the states of its peers' processes.

A store client serves one call at a time, and a call may block for as long as the store's host is stopped, so each thread of a rank has a
client of its own, and the calling thread has none.
"""

import contextlib
import itertools
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from offbeat.data.wire import decode_json
from offbeat.errors import DeadlineError, OffbeatError
from offbeat.pulse import waiting
from offbeat.sync.peers import Card, ProcessState, observe
from offbeat.sync.points import StoreKeys
from offbeat.sync.verdict import SyncVerdict

_log = logging.getLogger(__name__)

_FOREVER = timedelta(days=20)
"""Longest wait of a client: its milliseconds must fit in 32 bits. Deadlines are kept by the calling thread."""

_ENDING_S = 0.5
"""Time between a host's connections closing and the system reporting how it ended."""

_LOOK_S = 0.1
"""Interval between two looks at a store's host that has not answered yet."""

_RESOLVE_S = 0.5
"""Interval between two look-ups of a host name that has no address."""


def reach(host: str, port: int, *, timeout_s: float, server: Card | None = None, by_launcher: bool = False) -> dist.TCPStore:
    """Connect to the store at `host`:`port`; `server`, if known, is the rank that serves it.

    A launcher's store is there before its ranks are, so one that refuses connections is gone, and is not waited for.

    Torch's own timeout does not hold while the store's host is stopped, so its constructor runs in a thread that may be abandoned. A host
    name without an address is looked up again, with a warning, because a machine that is starting may get its address later.

    Raises:
        DeadlineError: the store does not answer within `timeout_s` seconds; a SyncTimeout where its host is stopped.
        PeerError: its host is dead, or the launcher that served it.
    """
    clients: queue.SimpleQueue[dist.TCPStore | dist.DistError | OffbeatError] = queue.SimpleQueue()

    def construct() -> None:
        try:
            _wait_for_address(host, timeout_s=timeout_s)
            clients.put(dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s)))
        except (dist.DistError, OffbeatError) as exc:
            clients.put(exc)

    threading.Thread(target=construct, name="store client", daemon=True).start()
    give_up_s = time.monotonic() + timeout_s
    failed: OffbeatError | None = None
    with waiting():
        while time.monotonic() < give_up_s and not _is(server, "dead"):
            with contextlib.suppress(queue.Empty):
                client = clients.get(timeout=_LOOK_S)
                if isinstance(client, dist.TCPStore):
                    return client
                failed = client if isinstance(client, OffbeatError) else None
                break
            if by_launcher and _refuses(host, port):
                text = f"the launcher, which served the store at {host}:{port}, is gone; start the run again"
                failed = SyncVerdict("failed", text).to_error("join")
                break
    error = failed or _unreachable(f"{host}:{port}", timeout_s=timeout_s, server=server)
    _log.error("%s", error)
    raise error


def _wait_for_address(host: str, *, timeout_s: float) -> None:
    """Ask for the address of a host until it has one; raises DeadlineError if it has none shortly before `timeout_s` seconds are over."""
    give_up_s = time.monotonic() + timeout_s - 2 * _RESOLVE_S
    for attempt in itertools.count():
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as exc:
            problem = f"the name {host!r} of the store's host has no address ({exc.strerror})"
            if time.monotonic() > give_up_s:
                raise DeadlineError(
                    f"{problem}, after {timeout_s:g} s; MASTER_ADDR is to be a name or an address of rank 0's machine") from exc
        if attempt == 0:
            _log.warning("%s; it is asked for again for %g s", problem, timeout_s)
        time.sleep(_RESOLVE_S)


def _refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_LOOK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # slow, or without an address yet
        return False
    return False


def _is(server: Card | None, kind: str) -> bool:
    return server is not None and server.is_near and observe(server).kind == kind


def _unreachable(address: str, *, timeout_s: float, server: Card | None) -> OffbeatError:
    if server is not None and (_is(server, "dead") or _is(server, "stopped")):
        state = observe(server)
        text = f"rank {state.rank} {state.text}, and with it the store that it hosts"
        if state.kind == "dead":
            return SyncVerdict("failed", text).to_error("join")
        return SyncVerdict("missed", f"sync point 'join' timed out after {timeout_s:g} s: {text}").to_error("join")
    return DeadlineError(f"no store answered at {address} within {timeout_s:g} s; rank 0 hosts it, so look at rank 0's log first")


def connect(store: dist.TCPStore, *, timeout_s: float, server: Card | None = None) -> dist.TCPStore:
    """Connect another client to the same store, as `reach` does; its calls then wait as long as necessary."""
    client = reach(store.host, store.port, timeout_s=timeout_s, server=server)
    client.set_timeout(_FOREVER)
    return client


@dataclass(frozen=True)
class MeetingPlace:
    """Where ranks meet.

    Attributes:
        store: rank 0's own store, or a client of it.
        prefix: prefix of every key in the store; unique per meeting where a store serves several, as torchrun's does on restarts.
        server: the rank that serves the store, if its process is known: it may die, or be stopped, before it has joined.
    """

    store: dist.TCPStore
    prefix: str = ""
    server: Card | None = None


class SyncPeers:
    """The processes of all ranks, as far as they have joined.

    Attributes:
        cards: cards of the processes, by rank.
        departed: whether a rank has left in good order, so that no further point can be passed.
        store_gone: whether the store's host has left or closed the connections.
    """

    def __init__(self, own: Card, *, world: int, address: str, server: Card | None = None) -> None:
        """`server` is the rank that serves the store, if it is known before that rank has joined."""
        self.own = own
        self.world = world
        self.cards: dict[int, Card] = {own.rank: own}
        self._server = server
        self.departed = False
        self.store_gone = False
        self._address = address

    def read_cards(self, client: dist.TCPStore, keys: StoreKeys) -> None:
        """Read the cards of processes that have joined since the last call."""
        for rank in set(range(self.world)) - set(self.cards):
            if client.check([keys.card(rank)]):
                self.cards[rank] = decode_json(Card, client.get(keys.card(rank)))

    def neighbours(self) -> list[Card]:
        """Cards of the other ranks on this machine."""
        return [card for card in list(self.cards.values()) if card.machine == self.own.machine and card.rank != self.own.rank]

    def states(self, among: Iterable[int] | None = None) -> tuple[ProcessState, ...]:
        """Return the process states of the neighbours, or of the ones whose rank is in `among`."""
        return tuple(observe(card) for card in self.neighbours() if among is None or card.rank in among)

    def store_lost(self) -> SyncVerdict:
        """Return the verdict for when the store has closed its connections."""
        self.store_gone = True
        state = self._host_state()
        give_up_s = time.monotonic() + _ENDING_S
        while state and state.kind != "dead" and time.monotonic() < give_up_s:
            time.sleep(0.02)
            state = self._host_state()
        if state and state.kind == "dead":
            return SyncVerdict("failed", f"rank {state.rank} {state.text}, and with it the store that it hosts")
        return SyncVerdict("failed", f"the store at {self._address} is gone; look at the log of its host ({self._host_name()})")

    def host_is_stopped(self) -> bool:
        """Whether the store cannot answer because the process that hosts it is stopped."""
        state = self._host_state()
        return state is not None and state.kind == "stopped"

    def store_silent(self, *, point: str, timeout_s: float, heard: bool) -> SyncVerdict:
        """Return the verdict when no answer came in time; `heard` tells whether the store itself answered meanwhile."""
        state = self._host_state()
        if state and state.kind == "dead":
            return self.store_lost()
        head = f"sync point {point!r} timed out after {timeout_s:g} s: "
        if state and state.kind == "stopped":
            return SyncVerdict("missed", f"{head}rank {state.rank} {state.text}, and with it the store that it hosts")
        if heard:
            return SyncVerdict("missed", f"{head}no verdict on it arrived")
        return SyncVerdict("missed", f"{head}the store at {self._address}, hosted by {self._host_name()}, does not answer")

    def _host(self) -> Card | None:
        return next((card for card in list(self.cards.values()) if card.hosts_store), self._server)

    def _host_state(self) -> ProcessState | None:
        host = self._host()
        return observe(host) if host is not None and host.machine == self.own.machine else None

    def _host_name(self) -> str:
        host = self._host()
        return f"rank {host.rank} on {host.host}" if host else "the launcher, or rank 0 where it does not"
