"""A watcher answers for its rank, and goes when it is told to or the store is gone."""

import queue
import threading
from types import SimpleNamespace

from offbeat.data.wire import decode_json, encode_json
from offbeat.sync.board import Board, Wait
from offbeat.sync.links import SyncPeers, connect
from offbeat.sync.mesh import host_store
from offbeat.sync.peers import own_card
from offbeat.sync.points import StoreKeys
from offbeat.sync.verdict import RankStatus, SyncVerdict
from offbeat.sync.watcher import Mail, Watcher


def _start(store, rank=1):
    board, posted = Board(rank), queue.SimpleQueue()
    peers = SyncPeers(own_card(rank, hosts_store=False), world=2, address="")
    watcher = Watcher(connect(store, timeout_s=30), board=board, peers=peers, keys=StoreKeys(), judge=SimpleNamespace(post=posted.put))
    watcher.thread.start()
    return board, peers, watcher, posted


def _send(store, mail, rank=1):
    store.queue_push(StoreKeys().mail(rank), encode_json(mail).decode())


def test_mail_crosses_the_store_as_it_is():
    for mail in (Mail("status", reply="here"), Mail("failed", verdict=SyncVerdict("failed", "rank 0 failed")), Mail("close")):
        assert decode_json(Mail, encode_json(mail)) == mail


def test_a_question_is_answered_and_a_failure_is_told():
    store = host_store(30)
    board, peers, watcher, _ = _start(store)
    peers.cards[0] = own_card(0, hosts_store=True)
    board.wait = Wait(3, "save", 5.0, None, threading.get_ident())
    _send(store, Mail("status", reply="here"))
    status = decode_json(RankStatus, store.queue_pop("here"))
    assert (status.rank, status.point, status.n) == (1, "save", 3)
    assert [state.rank for state in status.states] == [0]
    verdict = SyncVerdict("failed", "rank 0 failed: why")
    _send(store, Mail("failed", verdict=verdict))
    assert board.wait.messages.get(timeout=30) == verdict
    assert decode_json(SyncVerdict, store.get(StoreKeys().result(3))) == verdict
    _send(store, Mail("close"))
    watcher.thread.join(30)
    assert not watcher.thread.is_alive()
    assert peers.store_gone


def test_an_answer_that_breaks_is_announced_and_the_next_one_is_given():
    store = host_store(30)
    _, _, watcher, posted = _start(store)
    store.queue_push(StoreKeys().mail(1), "no mail")
    assert "its sync broke: " in posted.get(timeout=30).verdict.text
    _send(store, Mail("status", reply="here"))
    assert decode_json(RankStatus, store.queue_pop("here")).rank == 1
    _send(store, Mail("close"))
    watcher.thread.join(30)
    assert not watcher.thread.is_alive()
