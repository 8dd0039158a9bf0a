"""What a rank says when the store is silent or gone."""

import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from offbeat.errors import PeerError
from offbeat.sync.links import SyncPeers, connect, reach
from offbeat.sync.mesh import host_store
from offbeat.sync.peers import own_card


def _peers(*cards):
    peers = SyncPeers(own_card(1, hosts_store=False), world=2, address="127.0.0.1:5000")
    peers.cards |= {card.rank: card for card in cards}
    return peers


def test_every_thread_has_a_connection_of_its_own():
    store = host_store(30)
    first, second = connect(store, timeout_s=30), connect(store, timeout_s=30)
    first.queue_push("mail", "hello")
    assert second.queue_pop("mail") == b"hello"


def test_a_store_of_the_launcher_is_named_by_its_address():
    lost = _peers().store_lost()
    assert lost.kind == "failed"
    assert lost.text == "the store at 127.0.0.1:5000 is gone; look at the log of its host (the launcher, or rank 0 where it does not)"
    silent = _peers().store_silent(point="save", timeout_s=2.0, heard=False)
    assert silent.kind == "missed"
    assert silent.text.startswith("sync point 'save' timed out after 2 s: the store at 127.0.0.1:5000, hosted by the launcher")
    heard = _peers().store_silent(point="save", timeout_s=2.0, heard=True)
    assert heard.text == "sync point 'save' timed out after 2 s: no verdict on it arrived"


def test_a_host_on_another_machine_is_named():
    host = replace(own_card(0, hosts_store=True), host="node7", machine="another")
    assert "look at the log of its host (rank 0 on node7)" in _peers(host).store_lost().text
    assert _peers(host).neighbours() == []


def test_a_dead_host_takes_the_store_with_it():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    host = replace(own_card(0, hosts_store=True), pid=process.pid, started=1)
    peers = _peers(host)
    assert peers.store_lost().text == "rank 0 is gone, and with it the store that it hosts"
    assert peers.store_gone
    assert peers.store_silent(point="save", timeout_s=2.0, heard=False).kind == "failed"
    assert not peers.host_is_stopped()


def test_a_store_of_a_launcher_that_is_gone_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it accepts nobody: the launcher is stopped
        port = taken.getsockname()[1]
        failed = []

        def join():
            try:
                reach("127.0.0.1", port, timeout_s=300, by_launcher=True)
            except PeerError as exc:
                failed.append(exc)

        rank = threading.Thread(target=join, daemon=True)
        rank.start()
        time.sleep(0.3)
        assert rank.is_alive()
    rank.join(timeout=30)
    assert not rank.is_alive()
    assert f"the launcher, which served the store at 127.0.0.1:{port}, is gone; start the run again" in str(failed[0])


def test_a_store_that_a_rank_is_about_to_host_is_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    begun_s = time.monotonic()
    with pytest.raises(Exception, match="no store answered"):
        reach("127.0.0.1", port, timeout_s=1)
    assert time.monotonic() - begun_s >= 0.9
