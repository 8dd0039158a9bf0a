"""Memory of the server and of its workers."""

import subprocess
import sys

import psutil

from offbeat.service.app.processes import _name, processes
from waiting import wait_until


def memory() -> dict[str, int]:
    return {status.name: status.memory_bytes for status in processes()}


def test_a_worker_is_told_by_its_name_with_what_it_has_started() -> None:
    assert _name(["python", "-m", "offbeat.process", "a.b:C", "rank 0", "5", "77"]) == "rank 0"
    assert _name(["python", "-c", "from multiprocessing.resource_tracker import main"]) == "" == _name(["python", "-m", "offbeat.process"])
    code = "import subprocess, time; child = subprocess.Popen(['sleep', '60']); held = b'x' * (60 << 20); time.sleep(60)"
    worker = subprocess.Popen([sys.executable, "-c", code, "offbeat.process", "x:Y", "engine 7", "3", "1"])
    other = subprocess.Popen(["sleep", "60"])
    try:
        wait_until(lambda: memory().get("engine 7", 0) > 60 << 20, timeout_s=20)
        assert memory()["service"] > 1 << 20 and "" not in memory()
    finally:
        for child in psutil.Process(worker.pid).children():
            child.kill()
        for process in (worker, other):
            process.kill()
            process.wait()
