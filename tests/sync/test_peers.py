"""What the system says of a process, from its start to after its end."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.sync.peers import Deaths, end_if_stopped, observe, own_card
from waiting import wait_until


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def _card(process, rank=1):
    """The card that the process itself would show."""
    started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    return replace(own_card(rank, hosts_store=False), pid=process.pid, started=started)


def _end(process, sent):
    process.send_signal(sent)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_this_process_is_alive_and_its_time_is_told():
    state = observe(own_card(3, hosts_store=False))
    assert (state.rank, state.kind) == (3, "alive")
    assert state.text.startswith("is running, after ")
    assert state.text.endswith(" s of CPU time")


def test_a_stopped_a_killed_and_a_collected_process_are_told_apart(process):
    card = _card(process)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: observe(card).kind == "stopped", timeout_s=30)
    _end(process, signal.SIGKILL)
    assert observe(card).text == "was killed by SIGKILL"
    process.wait()
    assert (observe(card).kind, observe(card).text) == ("dead", "is gone")


def test_an_exit_code_is_told():
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=subprocess.PIPE) as process:
        card = _card(process)
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert observe(card).text == "exited with code 3"


def test_a_signal_without_a_name_is_told_by_its_number(process):
    card = _card(process)
    _end(process, signal.SIGRTMIN + 6)
    assert observe(card).text == f"was killed by signal {signal.SIGRTMIN + 6}"


def test_only_a_process_that_a_signal_has_stopped_is_ended(process):
    card = _card(process)
    end_if_stopped(card)
    assert process.poll() is None
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: observe(card).kind == "stopped", timeout_s=30)
    end_if_stopped(replace(card, started=1))
    assert process.poll() is None
    end_if_stopped(card)
    assert process.wait(30) == -signal.SIGKILL


def test_another_process_with_the_same_id_is_not_taken_for_it(process):
    assert observe(replace(_card(process), started=1)).text == "is gone"


@pytest.mark.parametrize("descriptors", [True, False])
def test_a_death_ends_the_wait(process, descriptors, monkeypatch):
    if not descriptors:
        monkeypatch.delattr(os, "pidfd_open")
    deaths = Deaths()
    deaths.add([own_card(0, hosts_store=False), _card(process)])
    threading.Timer(0.2, process.kill).start()
    assert deaths.wait() == [1]
    deaths.wake()
    assert deaths.wait() == []
    deaths.close()
    deaths.wake()


def test_a_process_that_died_before_it_was_watched_is_noticed(process):
    card = _card(process)
    process.kill()
    process.wait()
    deaths = Deaths()
    deaths.add([card])
    assert deaths.wait() == [1]
    deaths.close()
