"""The platform of a machine without an accelerator, and the table of those with one."""

import subprocess
import sys
import time

import pytest
import torch

from offbeat.errors import MachineError
from offbeat.sync.platform import _KINDS, Platform, current_platform


def test_without_an_accelerator_the_platform_is_the_cpu():
    if torch.accelerator.is_available():
        return
    assert current_platform.device == torch.device("cpu")
    assert current_platform.backend == "gloo"
    assert current_platform.visible_devices_variable == ""
    current_platform.set_device(3)
    current_platform.synchronize()


def test_the_platform_agrees_with_torch_about_the_device():
    found = torch.accelerator.current_accelerator(check_available=True)
    assert current_platform.device_type == (found.type if found else "cpu")


def test_every_accelerator_in_the_table_can_be_restricted():
    assert all(kind.visible_devices_variable for name, kind in _KINDS.items() if name != "cpu")


def test_memory_grows_with_what_is_allocated():
    before = current_platform.memory()
    block = torch.ones(64 * 2**20, dtype=torch.uint8, device=current_platform.device)
    assert before > 10 * 2**20
    assert current_platform.memory() >= before
    assert block[0] == 1


def test_a_wait_is_not_busy_on_a_cpu_and_work_is():
    if not current_platform.is_cpu:
        return
    started = current_platform.busy_clock()
    time.sleep(0.3)
    assert current_platform.busy_clock() - started < 0.1
    give_up_s = time.monotonic() + 30
    while current_platform.busy_clock() - started < 0.1:
        assert time.monotonic() < give_up_s


def test_importing_the_platform_touches_no_device():
    code = ("import torch; torch.accelerator.current_accelerator = None\n"
            "import offbeat.sync.platform as p; assert 'device_type' not in vars(p.current_platform)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_promised_device_that_is_not_there_is_an_error_and_not_the_cpu(monkeypatch):
    if torch.accelerator.is_available():
        return
    monkeypatch.setenv("OFFBEAT_NUM_DEVICES", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(MachineError, match=r"promised 2 accelerators, and torch \S+ finds none, where CUDA_VISIBLE_DEVICES = '0,1'"):
        _ = Platform().device
    monkeypatch.setenv("OFFBEAT_NUM_DEVICES", "0")
    assert Platform().is_cpu
