"""The thread of a rank that answers for it while its caller is busy, blocked or late.

    Watcher    consumes the rank's mail, a queue in the store; produces answers to the judges of other ranks, and the failure on its
               board; waits for mail; woken by the store
"""

import threading
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist

from offbeat.data.wire import decode_json, encode_json
from offbeat.sync.board import Board, Judging, breakage
from offbeat.sync.links import SyncPeers
from offbeat.sync.points import StoreKeys
from offbeat.sync.verdict import SyncVerdict


@dataclass(frozen=True)
class Mail:
    """A message from one rank to another.

    Attributes:
        kind: "close" ends the watcher that reads it; a leaving store host sends one to every rank.
        reply: key of the queue for the answer to "status".
        verdict: verdict of a "failed" message.
    """

    kind: Literal["status", "failed", "close"]
    reply: str = ""
    verdict: SyncVerdict | None = None


class Watcher:
    """Reads mail until "close", or until the store is gone."""

    def __init__(self, client: dist.TCPStore, *, board: Board, peers: SyncPeers, keys: StoreKeys, judge: Judging) -> None:
        """`judge` hears that an answer broke."""
        self._client = client
        self._board = board
        self._peers = peers
        self._keys = keys
        self._judge = judge
        self.thread = threading.Thread(target=self._run, name="sync watcher", daemon=True)

    def _run(self) -> None:
        open_ = True
        while open_:
            try:
                open_ = self._answer_mail(decode_json(Mail, self._client.queue_pop(self._keys.mail(self._board.rank))))
            except dist.DistError:
                return  # the store is gone; a rank learns that at its next point
            except Exception as exc:  # of whatever kind: the peers must hear that this rank is out
                self._judge.post(breakage(self._board.rank, exc))

    def _answer_mail(self, mail: Mail) -> bool:
        if mail.kind == "status":
            status = replace(self._board.status(), states=self._peers.states())
            self._client.queue_push(mail.reply, encode_json(status).decode())
        elif mail.kind == "close":
            self._peers.store_gone = True
        elif mail.verdict is not None and (wait := self._board.fail(mail.verdict)):
            # Release the thread that waits for the point's result, here and on other ranks.
            self._client.compare_set(self._keys.result(wait.n), "", encode_json(mail.verdict).decode())
        return mail.kind != "close"
