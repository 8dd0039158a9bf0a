"""The platform of a machine without an accelerator, and the table of those with one."""

import subprocess
import sys
import time

import pytest
import torch

from offbeat.errors import MachineError
from offbeat.sync.platform import _KINDS, Platform, current_platform, peak_of


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
    watch, started = current_platform.stopwatch(), time.thread_time()
    watch.start()
    time.sleep(0.3)
    watch.stop()
    watch.start()
    while time.thread_time() - started < 0.1:
        pass
    watch.stop()
    worked_s = time.thread_time() - started
    assert worked_s - 0.05 < watch.take_s() <= worked_s
    assert watch.take_s() == 0.0


class Queue:
    """A pretended device: work takes time in its queue, and the host does not wait for it."""

    def __init__(self):
        self.now_ms, self.num_waits = 0.0, 0

    def event(self, device_type, *, enable_timing):
        assert (device_type, enable_timing) == ("cuda", True)
        return Event(self)


class Event:
    def __init__(self, queue):
        self._queue = queue

    def record(self):
        self.at_ms = self._queue.now_ms

    def synchronize(self):
        self._queue.num_waits += 1

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


def pretended(monkeypatch, name="NVIDIA H100 80GB HBM3"):
    queue, platform = Queue(), Platform()
    platform.device_type = "cuda"
    monkeypatch.setattr(torch, "Event", queue.event)
    monkeypatch.setattr(Platform, "device_name", name)
    return queue, platform


def test_an_accelerator_is_busy_between_events_and_only_the_sum_waits_for_it(monkeypatch):
    queue, platform = pretended(monkeypatch)
    watch = platform.stopwatch()
    for work_ms, wait_ms in ((20, 500), (30, 700)):
        watch.start()
        queue.now_ms += work_ms
        watch.stop()
        queue.now_ms += wait_ms
        watch.stop()
    assert queue.num_waits == 0
    assert watch.take_s() == pytest.approx(0.05) and queue.num_waits == 1
    assert watch.take_s() == 0.0 and queue.num_waits == 1


class Meet(torch.autograd.Function):
    """A free forward pass; the gradient takes 10 ms, after which the pass waits 900 ms for peers at its very end, as DDP does."""

    queue = Queue()

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        def wait():
            Meet.queue.now_ms += 900

        Meet.queue.now_ms += 10
        torch.autograd.Variable._execution_engine.queue_callback(wait)
        return gradient


def test_what_a_backward_pass_waits_for_at_its_end_is_not_busy(monkeypatch):
    Meet.queue, platform = pretended(monkeypatch)
    watch, x = platform.stopwatch(), torch.ones(3, requires_grad=True)
    watch.start()
    loss = Meet.apply(x * 2).sum()
    watch.stop_after_backward(loss)
    loss.backward()
    watch.stop()
    assert x.grad is not None and Meet.queue.now_ms == 910
    assert watch.take_s() == pytest.approx(0.010)


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989), ("NVIDIA H20", 148),
    ("NVIDIA GB200", 2500), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("AMD Instinct MI300X", 1307),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0), ("Tesla T4", 0), ("", 0)])
def test_the_peak_of_a_device_is_known_by_its_name(name, tflops, monkeypatch):
    assert peak_of(name) == tflops * 1e12
    assert pretended(monkeypatch, name)[1].peak_flop_per_s == tflops * 1e12


def test_a_cpu_has_no_peak():
    if current_platform.is_cpu:
        assert (current_platform.device_name, current_platform.peak_flop_per_s) == ("", 0.0)


def test_importing_the_platform_touches_no_device():
    code = ("import torch; torch.accelerator.current_accelerator = None\n"
            "import offbeat.sync.platform as p; assert 'device_type' not in vars(p.current_platform)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_promised_device_that_is_not_there_is_an_error_and_not_the_cpu(monkeypatch):
    if torch.accelerator.is_available():
        return
    monkeypatch.setenv("OFFBEAT_NUM_DEVICES", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(MachineError, match=r"assigned 2 accelerators, and torch \S+ finds none, where CUDA_VISIBLE_DEVICES = '0,1'"):
        _ = Platform().device
    monkeypatch.setenv("OFFBEAT_NUM_DEVICES", "0")
    assert Platform().is_cpu
