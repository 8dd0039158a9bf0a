"""The thread of a rank that registers its arrivals in the store, so that the caller never waits for anything but its own deadline.

    Arrivals    consumes the caller's waits; produces PASSED or a verdict on the wait, and the point's result in the store if this rank
                comes last; waits for the caller, then for the point's result; woken by the caller, then by the last rank or any judge

Each rank needs two store operations per point: it adds its ticket, and then either sets the result (the last to come) or gets it.
"""

import contextlib
import queue
import threading

import torch.distributed as dist

from offbeat.data.wire import decode_json
from offbeat.sync import points
from offbeat.sync.board import PASSED, Board, Judging, Message, Wait, breakage
from offbeat.sync.links import SyncPeers
from offbeat.sync.points import GO, StoreKeys
from offbeat.sync.verdict import SyncVerdict

_IDLE_S = 0.05
"""A caller that has not arrived for this long is busy elsewhere, so this thread may tidy up."""

_BACKLOG = 1000
"""Number of passed points in the store from which on the thread tidies up between any two."""


class Arrivals:
    """Registers one wait after the other, from the queue `waits`, in which None ends the thread."""

    def __init__(self, client: dist.TCPStore, *, board: Board, peers: SyncPeers, keys: StoreKeys, judge: Judging) -> None:
        """`judge` is asked to look at a point that cannot be passed as it is, or hears that this thread broke."""
        self.waits: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
        self._client = client
        self._board = board
        self._peers = peers
        self._keys = keys
        self._judge = judge
        self._passed = 0
        self._pruned = 0
        self.thread = threading.Thread(target=self._run, name="sync arrivals", daemon=True)

    def _run(self) -> None:
        while True:
            try:
                if (wait := self._next()) is None:
                    return
                message = self._arrive(wait)
                if message is PASSED and wait.n == 1:
                    self._peers.read_cards(self._client, self._keys)  # All are there; soon the store may not answer.
                wait.messages.put(message)
                if message is PASSED and self._board.rank == 0:
                    self._passed = wait.n
            except dist.DistError:
                self._board.fail(self._peers.store_lost())
            except Exception as exc:  # of whatever kind: the peers must hear that this rank is out
                self._judge.post(breakage(self._board.rank, exc))

    def _arrive(self, wait: Wait) -> Message:
        count = points.read(self._client.add(self._keys.count(wait.n), points.ticket(wait.signature)), wait.signature)
        key = self._keys.result(wait.n)
        # Passed if and only if this ticket was the last, nobody had given up, and all names agree; see `points`.
        if count.poisons == 0 and count.agreed and count.arrived == self._peers.world:
            return self._message_of(self._client.compare_set(key, "", GO))
        if count.poisons == 0 and (not count.agreed or self._peers.departed):
            self._judge.post(wait)
        return self._message_of(self._client.get(key))

    def _message_of(self, result: bytes) -> Message:
        return PASSED if result.decode() == GO else decode_json(SyncVerdict, result)

    def _next(self) -> Wait | None:
        """Return the caller's next wait. While it is elsewhere, delete points before the last one passed: all have read their results."""
        while (backlog := self._passed - 1 - self._pruned) > 0:
            with contextlib.suppress(queue.Empty):
                return self.waits.get(timeout=_IDLE_S if backlog < _BACKLOG else 0)
            while self._pruned < self._passed - 1 and self.waits.empty():
                self._pruned += 1
                self._client.delete_key(self._keys.count(self._pruned))
                self._client.delete_key(self._keys.result(self._pruned))
        return self.waits.get()
