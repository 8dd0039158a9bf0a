"""The thread of a rank that takes its arrivals to the store, so that the caller never waits for anything but its own deadline.

    Arrivals    consumes the caller's waits; produces PASSED or a verdict on the wait, and the point's result in the store when it comes
                last; waits for the caller, then for the point's result; woken by the caller, then by the last rank, or the judge of any

Each rank does two store operations per point: it adds its ticket, and either sets the result (the last to come) or gets it.
"""

import queue
import threading
from collections.abc import Callable

import torch.distributed as dist

from offbeat.data.wire import decode_json
from offbeat.dist import points
from offbeat.dist.board import PASSED, Board, Message, Wait
from offbeat.dist.links import Peers
from offbeat.dist.points import GO, Keys
from offbeat.dist.verdict import Verdict


class Arrivals:
    """Does one wait after the other.

    Attributes:
        waits: the caller puts them, and None to end the thread.
    """

    def __init__(
        self, client: dist.TCPStore, *, board: Board, peers: Peers, keys: Keys, doubt: Callable[[Wait], None],
    ) -> None:
        """`doubt` asks the judge to look at a point that cannot be passed as it is."""
        self.waits: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
        self._client = client
        self._board = board
        self._peers = peers
        self._keys = keys
        self._doubt = doubt
        self._pruned = 0
        self.thread = threading.Thread(target=self._run, name="sync arrivals", daemon=True)

    def _run(self) -> None:
        while (wait := self.waits.get()) is not None:
            try:
                message = self._arrive(wait)
                wait.messages.put(message)
                if message is PASSED and self._board.rank == 0:
                    self._prune(wait.n)
            except dist.DistError:
                self._board.fail(self._peers.store_lost())

    def _arrive(self, wait: Wait) -> Message:
        count = points.read(self._client.add(self._keys.count(wait.n), points.ticket(wait.name)), wait.name)
        if count.poisons == 0 and count.agreed and count.arrived == self._peers.world:
            self._client.set(self._keys.result(wait.n), GO)
            return PASSED
        if count.poisons == 0 and (not count.agreed or self._peers.departed):
            self._doubt(wait)
        result = self._client.get(self._keys.result(wait.n)).decode()
        return PASSED if result == GO else decode_json(Verdict, result)

    def _prune(self, n: int) -> None:
        """Forget the points before the n-th: who has come to it has the results of all before."""
        while self._pruned < n - 1:
            self._pruned += 1
            self._client.delete_key(self._keys.count(self._pruned))
            self._client.delete_key(self._keys.result(self._pruned))
