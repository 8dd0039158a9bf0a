"""The reaper kills what it was told of when its standard input ends, and nothing else."""

import subprocess
import sys

import psutil

from offbeat.cluster.ray_reaper import start_reaper


def test_descendants_are_killed_when_standard_input_ends_and_a_pid_that_is_gone_is_no_error() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeper:
        reaper = start_reaper()
        assert str(sleeper.pid) in psutil.Process(reaper.pid).cmdline()
        assert sleeper.poll() is None
        reaper.communicate(timeout=20)
        assert sleeper.wait(timeout=5) == -9
    with subprocess.Popen([sys.executable, "-c", ""]) as short:
        reaper = start_reaper()
        short.wait()
    reaper.communicate(timeout=20)
    assert reaper.returncode == 0
