"""`make gpu-check`, rehearsed on the CPU, and the page that it writes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.sync.platform import current_platform

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"


def call(*arguments):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_its_parts_run_on_the_cpu_at_tiny_shapes(tmp_path):
    out = tmp_path / "gpu.json"
    done = call("--cpu", "--out", str(out), "--parts", "attention", "head", "adapters", "collectives")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["device"] == "CPU, a rehearsal"
    assert list(found["parts"]) == ["attention", "head", "adapters", "collectives"]
    assert all("result" in part for part in found["parts"].values())


def test_a_part_that_fails_is_reported_and_hides_no_other():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    gpu_check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_check)
    found = gpu_check.guarded("broken", lambda: 1 / 0)
    assert found["error"] == "ZeroDivisionError: division by zero"
    assert gpu_check.guarded("sound", lambda: {"a": 1})["result"] == {"a": 1}


def test_without_a_gpu_it_says_so():
    if not current_platform.is_cpu:
        pytest.skip("there is a GPU")
    done = call()
    assert done.returncode == 2
    assert done.stderr == "gpu-check needs a GPU that torch can use, and found none; --cpu rehearses it on the CPU\n"
