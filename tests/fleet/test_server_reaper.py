"""What ends a server's process group; whole servers end in `test_server_worker.py`."""

import signal
import subprocess
import sys

from offbeat.fleet.server_reaper import ServerReaper, members, reap
from signals import has_signal
from waiting import wait_until

FAMILY = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"


def family() -> "subprocess.Popen[bytes]":
    """A process with a child, in a group of their own."""
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], start_new_session=True)
    wait_until(lambda: len(members(parent.pid)) == 2, timeout_s=60)
    return parent


def test_a_group_is_killed_with_all_its_members() -> None:
    parent = family()
    reap(parent.pid)
    assert not members(parent.pid)
    assert parent.wait() < 0
    reap(parent.pid)  # nobody is left, which is no error


def test_a_group_ends_when_the_reaper_is_forgotten() -> None:
    parent = family()
    reaper = ServerReaper(parent.pid)
    wait_until(lambda: has_signal(reaper._process.pid, signal.SIGTERM, mask="SigIgn"), timeout_s=60)
    reaper._process.terminate()  # as all processes of a job are, while the worker goes on
    assert len(members(parent.pid)) == 2
    assert reaper._process.stdin is not None
    reaper._process.stdin.close()
    wait_until(lambda: not members(parent.pid), timeout_s=60)
    assert parent.wait() < 0 and reaper._process.wait() == 0
