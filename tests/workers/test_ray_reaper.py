"""The reaper kills what it was told of, children included, when its standard input ends, and nothing else."""

import signal
import subprocess
import sys

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
