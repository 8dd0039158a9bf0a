"""The reaper kills what it was told of, children included, and what bears its mark, when its standard input ends, and nothing else."""

import os
import signal
import subprocess
import sys
import time

import psutil

from offbeat.workers.ray_reaper import Reaper
from signals import has_signal
from waiting import wait_until

SLEEP = "import time; time.sleep(60)"


def test_what_it_was_told_of_is_killed_with_its_children_and_a_pid_that_is_gone_is_no_error() -> None:
    parent_of_one = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True); {SLEEP}"
    reaper = Reaper()
    with (
        subprocess.Popen([sys.executable, "-c", ""]) as short,
        subprocess.Popen([sys.executable, "-c", SLEEP]) as other,
        subprocess.Popen([sys.executable, "-c", parent_of_one], stdout=subprocess.PIPE, text=True) as parent,
    ):
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        short.wait()
        reaper.add([short.pid])
        reaper.add([parent.pid])
        wait_until(lambda: has_signal(reaper._process.pid, signal.SIGTERM, mask="SigIgn"), timeout_s=60)
        reaper._process.terminate()  # as all processes of a job are, while the controller goes on
        assert (parent.poll(), child.is_running()) == (None, True)
        reaper.reap()
        assert parent.wait(timeout=30) == -9
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert other.poll() is None
        other.kill()


def test_what_was_started_while_ray_started_is_killed_although_it_hides_its_mark_or_its_parent_is_gone() -> None:
    hides = f"import os, sys; input(); os.execve(sys.executable, [sys.executable, '-c', {SLEEP!r}], {{}})"
    leaves = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True)"
    reaper = Reaper()
    before = dict(os.environ)
    with reaper.starting():
        hiding = subprocess.Popen([sys.executable, "-c", hides], stdin=subprocess.PIPE)
        leaving = subprocess.Popen([sys.executable, "-c", leaves], stdout=subprocess.PIPE, text=True)
        wait_until(lambda: has_signal(reaper._process.pid, signal.SIGTERM, mask="SigIgn"), timeout_s=60)
        time.sleep(2)  # it looks four times a second
        assert hiding.stdin is not None and leaving.stdout is not None
        hiding.stdin.write(b"\n")
        hiding.stdin.flush()
        wait_until(lambda: "OFFBEAT_LOCAL_RAY" not in psutil.Process(hiding.pid).environ(), timeout_s=60)
    assert dict(os.environ) == before
    with hiding, leaving, subprocess.Popen([sys.executable, "-c", SLEEP]) as other:
        left = psutil.Process(int(leaving.stdout.readline()))
        assert leaving.wait(timeout=60) == 0 and left.is_running()
        reaper.reap()
        assert hiding.wait(timeout=30) == -9
        wait_until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE, timeout_s=30)
        assert other.poll() is None
        other.kill()
