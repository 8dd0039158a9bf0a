"""Named points at which all ranks meet, each with a deadline, and the collectives behind them; `groups.sync` in every rank.

No rank enters a collective before all ranks have come to its name. When one does not come, every rank, the late one included, raises the
same error, which names the missing rank, its state (slow, stopped, dead or not answering), its phase and its stack; the groups stay
usable, because gloo was never entered. A rank that died or failed ends all waits at once.

The caller waits only for its own deadline; the store, whose host may itself be stopped, is left to three threads:

    caller      consumes messages on its wait; produces waits, and cases for the judge; waits for a message or its deadline;
                woken by its Arrivals, Watcher or SyncJudge
    Arrivals    (arrivals.py) takes waits to the store and brings their results
    Watcher     (watcher.py) answers for this rank
    SyncJudge   (judge.py) finds out why a point was not passed
"""

import atexit
import contextlib
import logging
import math
import queue
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Self, TypeVar

import torch.distributed as dist

from offbeat import pulse
from offbeat.config.dist import DistConfig
from offbeat.data.wire import decode, encode, encode_json
from offbeat.errors import ConfigError, OffbeatError, PeerError, StuckError, SyncError
from offbeat.sync import exchange
from offbeat.sync.arrivals import Arrivals
from offbeat.sync.board import Announcement, Board, Message, RankListener, Renewed, Wait
from offbeat.sync.faults import FaultInjector
from offbeat.sync.judge import STORE_S, Broken, Departure, SyncJudge
from offbeat.sync.links import MeetingPlace, SyncPeers, connect
from offbeat.sync.peers import end_if_stopped, own_card
from offbeat.sync.platform import current_platform
from offbeat.sync.points import MAX_WORLD, StoreKeys
from offbeat.sync.verdict import SyncVerdict
from offbeat.sync.watcher import Watcher

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE_S = 0.1
"""Length of the short waits that make up a grace period: a clock runs on while this process is stopped, a count of waits does not."""

_EXCHANGE_S = 5.0
"""Grace on top of a point's deadline for the few bytes exchanged behind it; all ranks are there, so only a busy machine needs it."""

_STEPS = 3
"""Number of the judge's steps towards a verdict, each answered within a grace period: asking the rank that this wait is patient with,
waiting for the result of the judge that came first, and asking all ranks.
"""

_ANNOUNCE_S = 1.0
"""Time for the peers to be told of a failure; the failing rank has a more important error to report than a failed announcement."""

_CLOSE_S = 2.0
"""Time for the threads to end: they block only when the store's host does, whose own SyncJudge lingers for a second."""

_COLLECTIVE_FAILED = re.compile(r"\bgloo\b|\bnccl\b|Operation timed out", re.IGNORECASE)
"""Matches the text of a RuntimeError raised by a collective; an error of another type is always the block's own."""


def _is_of_collective(exc: BaseException) -> bool:
    return isinstance(exc, dist.DistError) or (
        isinstance(exc, RuntimeError) and not isinstance(exc, OffbeatError) and bool(_COLLECTIVE_FAILED.search(str(exc))))


class Sync:
    """Sync points of one rank, created by `offbeat.sync.mesh.join`. Methods are collective unless stated, for one thread at a time.

    Every named method raises

        SyncTimeout: a rank did not come within `timeout_s` (default `dist.sync_timeout_s`) seconds.
        SyncMismatch: ranks came under different names.
        PeerError: a rank failed or died; every later point raises it, too. A StuckError: one is stopped or hangs while others are inside.
        ConfigError: `timeout_s` is not a positive number of seconds.
    """

    cpu_group: dist.ProcessGroup
    """Gloo over all ranks; set by `join` once they have met."""

    def __init__(self, *, rank: int, world: int, config: DistConfig, listener: RankListener | None) -> None:
        self.rank = rank
        self.world = world
        self._config = config
        self._injector = FaultInjector(rank)
        self._injector.arm()
        self._listener = listener
        self._board = Board(rank, self)
        self._closed = False
        self._reported: SyncVerdict | None = None

    @classmethod
    def start(
        cls, *, rank: int, world: int, place: MeetingPlace, config: DistConfig, hosts_store: bool, listener: RankListener | None = None,
    ) -> Self:
        """Connect to the store and start the threads that serve other ranks; not collective.

        `place` has any client of the store, which is not used after this; `listener` is that of `offbeat.sync.mesh.join`.
        """
        if not 1 <= world <= MAX_WORLD:
            raise ConfigError(f"the number of ranks must be in 1..{MAX_WORLD}, got {world}")
        sync = cls(rank=rank, world=world, config=config, listener=listener)
        if world > 1:  # a single rank waits for nobody, and needs no threads
            sync._start(place, hosts_store=hosts_store)
        return sync

    def _start(self, place: MeetingPlace, *, hosts_store: bool) -> None:
        store, server, keys = place.store, place.server, StoreKeys(place.prefix)
        card = own_card(self.rank, hosts_store=hosts_store)
        self._peers = SyncPeers(card, world=self.world, address=f"{store.host}:{store.port}", server=server)
        common = {"board": self._board, "peers": self._peers, "keys": keys}
        clients = [connect(store, timeout_s=self._config.init_timeout_s, server=server) for _ in range(3)]
        self._judge = SyncJudge(
            clients[0], answer_timeout_s=self._config.answer_timeout_s, patience_s=self._config.sync_timeout_s, **common)
        self._arrivals = Arrivals(clients[1], judge=self._judge, **common)
        self._watcher = Watcher(clients[2], judge=self._judge, **common)
        store.set(keys.card(self.rank), encode_json(card).decode())
        for worker in (self._judge, self._arrivals, self._watcher):
            worker.thread.start()
        # A thread that wakes up in native code while the interpreter shuts down would crash the process.
        atexit.register(self._at_exit)

    def arrive(self, name: str, *, timeout_s: float | None = None, patient_with: Iterable[int] = (), keys: Iterable[str] = ()) -> None:
        """Return when all ranks have come to `name` with the same `keys`, without any collective.

        The wait is patient with some ranks: its deadline starts again as long as each of them is there or has shown life with `beat`
        within the last `timeout_s`, because it may wait for something that has a deadline of its own.
        """
        timeout_s = self._config.sync_timeout_s if timeout_s is None else timeout_s
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"the timeout of sync point {name!r} must be a number of seconds > 0, got {timeout_s}")
        name = self._injector.strike(name)
        board = self._board
        board.arrivals += 1
        if self.world == 1:
            return
        if self._closed:
            raise PeerError(f"sync point {name!r} cannot be passed: this rank has left")
        wait = board.wait = Wait(board.arrivals, name, timeout_s, frozenset(patient_with) - {self.rank}, threading.get_ident(), tuple(keys))
        try:
            with pulse.waiting():
                # In this order: a failure that comes after this look finds the wait on the board.
                message = board.failure or self._await(wait)
        except BaseException as exc:  # such as KeyboardInterrupt. The peers have counted this rank and must not go on without it.
            text = f"sync point {name!r} was not passed: rank {self.rank} was interrupted while it waited ({type(exc).__name__})"
            wait.abandoned = SyncVerdict("missed", text)
            self._judge.post(wait)
            raise
        finally:
            board.leave_point(name)
        assert not isinstance(message, Renewed), "a renewed wait goes on"
        if message is not None:
            raise self._report(message, name)

    def _await(self, wait: Wait) -> Message:
        self._arrivals.waits.put(wait)
        while True:
            try:
                message = wait.messages.get(timeout=wait.timeout_s)
            except queue.Empty:
                self._judge.post(wait)
                message = self._await_verdict(wait)
            if not isinstance(message, Renewed):
                return message

    def _await_verdict(self, wait: Wait) -> Message:
        grace = math.ceil((self._config.answer_timeout_s + STORE_S) / _SLICE_S)
        for i in range(_STEPS * grace):
            with contextlib.suppress(queue.Empty):
                return wait.messages.get(timeout=_SLICE_S)
            if self._peers.host_is_stopped() or (i >= grace and not wait.heard):
                break
        wait.abandoned = self._peers.store_silent(point=wait.name, timeout_s=wait.timeout_s, heard=wait.heard)
        return wait.abandoned

    def _report(self, verdict: SyncVerdict, name: str) -> SyncError:
        error = verdict.to_error(name)
        if verdict is not self._reported:  # a failure is raised again at every later point
            _log.error("rank %d: %s", self.rank, error)
            self._reported = verdict
        return error

    def barrier(self, name: str, *, timeout_s: float | None = None) -> None:
        """Return when this rank's device is idle and all ranks have come to `name`."""
        current_platform.synchronize()
        self.arrive(name, timeout_s=timeout_s)
        with self._inside(name):
            self._soon(timeout_s)(dist.barrier(group=self.cpu_group, async_op=True))

    def sum_scalars(self, name: str, values: Mapping[str, float], *, timeout_s: float | None = None) -> dict[str, float]:
        """Sum each value over the ranks, in float64; all must pass the same keys, and all get the same bits."""
        self.arrive(name, timeout_s=timeout_s, keys=sorted(values))
        with self._inside(name):
            return exchange.reduce_scalars(values, dist.ReduceOp.SUM, group=self.cpu_group, finish=self._soon(timeout_s))

    def max_scalars(self, name: str, values: Mapping[str, float], *, timeout_s: float | None = None) -> dict[str, float]:
        """Take each value's maximum over the ranks; arguments as for `sum_scalars`."""
        self.arrive(name, timeout_s=timeout_s, keys=sorted(values))
        with self._inside(name):
            return exchange.reduce_scalars(values, dist.ReduceOp.MAX, group=self.cpu_group, finish=self._soon(timeout_s))

    def gather(self, name: str, value: T, *, timeout_s: float | None = None, patient: bool = False) -> list[T]:
        """Return every rank's value, ordered by rank, on every rank. The values have one type, which `offbeat.data.wire` encodes.

        With `patient`, the wait is patient with all ranks.
        """
        data = encode(value)
        self.arrive(name, timeout_s=timeout_s, patient_with=range(self.world) if patient else ())
        with self._inside(name):
            everybody = exchange.all_gather_bytes(data, group=self.cpu_group, finish=self._soon(timeout_s))
            return [decode(type(value), item) for item in everybody]

    def broadcast(self, name: str, value: bytes | None, *, source: int = 0, timeout_s: float | None = None) -> bytes:
        """Return the source's bytes; the other ranks pass None. The wait is patient with the source."""
        assert (value is not None) == (self.rank == source), f"rank {source} alone gives what is sent from it"
        self.arrive(name, timeout_s=timeout_s, patient_with=(source,))
        with self._inside(name):
            return exchange.broadcast_bytes(value or b"", source=source, group=self.cpu_group, finish=self._finish)

    def scatter(self, name: str, parts: Sequence[bytes] | None, *, source: int = 0, timeout_s: float | None = None) -> bytes:
        """Return this rank's part: the source passes one per rank, of any sizes, the others None. Patient as `broadcast`."""
        assert len(parts or ()) == (self.world if self.rank == source else 0), f"rank {source} alone gives one part per rank"
        self.arrive(name, timeout_s=timeout_s, patient_with=(source,))
        with self._inside(name):
            return exchange.scatter_bytes(parts or (), source=source, group=self.cpu_group, finish=self._finish)

    @contextmanager
    def region(self, name: str, *, timeout_s: float | None = None) -> Iterator[None]:
        """Wait for all ranks; then the block may use torch's own collectives.

        When a collective breaks, the error is a verdict as at a point, if some rank stands out. Any other exception of the block
        propagates unchanged, after the peers have been told that this rank failed. Either way no point will be passed again, and the
        process must end: a peer may sit in a collective that only this releases.
        """
        self.arrive(name, timeout_s=timeout_s)
        with self._inside(name):
            yield

    @contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        around, n = self._board.inside, self._board.arrivals
        self._board.inside = n
        try:
            yield
        except SyncError:
            raise
        except BaseException as exc:  # torch's CheckpointException is not an Exception
            self._board.inside = 0
            if verdict := self._why_broken(name, n, exc):
                raise self._report(verdict, name) from exc
            self.fail(f"{type(exc).__name__}: {exc}")
            raise
        finally:
            self._board.inside = around

    def _why_broken(self, name: str, n: int, exc: BaseException) -> SyncVerdict | None:
        if self.world == 1 or not _is_of_collective(exc):
            return None
        case = Broken(name, n, str(exc).splitlines()[0])
        self._judge.post(case)
        for _ in range(math.ceil((self._config.answer_timeout_s + 2 * STORE_S) / _SLICE_S)):
            with contextlib.suppress(queue.Empty):
                return case.verdict.get(timeout=_SLICE_S)
        return self._board.failure

    def _soon(self, timeout_s: float | None) -> exchange.Finish:
        """Return `_finish` for the few bytes exchanged behind a point with this timeout."""
        return partial(self._finish, limit_s=(self._config.sync_timeout_s if timeout_s is None else timeout_s) + _EXCHANGE_S)

    def _finish(self, work: dist.Work | None, *, limit_s: float = math.inf) -> None:
        """Wait for a collective in short slices, so that a peer's failure is noticed."""
        assert work is not None, "an asynchronous collective returns its work"
        give_up_s = time.monotonic() + min(self._config.collective_timeout_s, limit_s)
        with pulse.waiting():
            while True:
                try:
                    work.wait(timedelta(seconds=_SLICE_S))
                    return
                except RuntimeError:
                    if work.is_completed():  # just after the slice ended, or because it broke
                        work.wait()
                        return
                    if self._board.failure or time.monotonic() > give_up_s:
                        raise

    def beat(self) -> None:
        """Record that this rank is alive and waits under a deadline of its own; not collective, cheap, from any thread."""
        self._board.beat_s = time.monotonic()

    def check(self) -> None:
        """Raise PeerError if a peer has died or failed; not collective, cheap, from any thread. For a rank that waits for other things."""
        if failure := self._board.failure:
            if failure.kind == "stuck":
                raise failure.to_error(self._board.last)
            head, newline, stacks = failure.text.partition("\n")
            raise PeerError(f"the run cannot go on: {head}; this rank had come as far as sync point {self._board.last!r}{newline}{stacks}")

    def end_stopped(self) -> None:
        """Kill the stopped ranks of this machine, for a rank whose run has failed; not collective.

        They can report nothing any more, and do not react to the signal by which a launcher ends the others gracefully.
        """
        if self.world == 1:
            return
        for card in self._peers.neighbours():
            end_if_stopped(card)

    def fail(self, reason: str) -> None:
        """Tell all peers that this rank failed; not collective. They, and this rank, raise PeerError at every point from here on.

        The first call of this or of `pass_on` counts. Never raises. The `reason` does not name this rank.
        """
        self._give_up(SyncVerdict("failed", f"rank {self.rank} failed: {reason}"))

    def pass_on(self, error: SyncError) -> None:
        """Tell all peers an error that names another rank as the one to blame. As `fail` otherwise."""
        self._give_up(SyncVerdict("failed", str(error)))

    def _give_up(self, verdict: SyncVerdict) -> None:
        if self.world > 1 and not (self._closed or self._board.failure or self._peers.host_is_stopped()):
            self._announce(verdict)

    def _announce(self, verdict: SyncVerdict) -> None:
        case = Announcement(verdict)
        self._judge.post(case)
        case.done.wait(_ANNOUNCE_S)

    def hang(self, text: str) -> None:
        """Tell all peers that this rank hangs, in a sentence that names it; not collective, from any thread but the one that hangs."""
        if self._closed:
            return
        verdict = SyncVerdict("stuck", text)
        if self.world > 1:
            self._announce(verdict)
        self._board.fail(verdict)  # whether or not they were told; the first failure stays

    def hear_of_stuck(self, verdict: SyncVerdict) -> None:
        """See `BoardListener.hear_of_stuck`."""
        error = StuckError(verdict.text)
        _log.error("rank %d: %s", self.rank, error)
        self._reported = verdict
        if self._listener is not None:
            self._listener.give_up(error)

    def close(self) -> None:
        """Leave in good order; not collective. Peers that wait for this rank afterwards raise PeerError."""
        self._end(Departure(in_order=True))

    def _at_exit(self) -> None:
        """Handle a process that ends without having left: waiting peers get the exception that ends it, else its exit code."""
        error = getattr(sys, "last_value", None)
        if error is not None and not isinstance(error, SyncError):
            self.fail(f"{type(error).__name__}: {error}")
        self._end(Departure(in_order=False))

    def _end(self, leave: Departure) -> None:
        if self.world == 1 or self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._arrivals.waits.put(None)
        self._judge.post(leave)
        give_up_s = time.monotonic() + (0.0 if self._peers.host_is_stopped() else _CLOSE_S)
        for worker in (self._judge, self._arrivals, self._watcher):
            worker.thread.join(max(0.0, give_up_s - time.monotonic()))
