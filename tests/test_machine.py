"""What this machine has."""

from pathlib import Path

import psutil
import pytest

from offbeat.machine import Device, has_devices, machine_bytes, smallest_device, visible_devices


def test_memory_is_at_most_what_the_machine_has() -> None:
    assert 2**20 < machine_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(("given", "expected"), [
    ("", []), ("3,5", ["3", "5"]), (" 0, 2", ["0", "2"]), ("1,-1,2", ["1"]), ("NoDevFiles", []),
    ("GPU-8a2f,MIG-77", ["GPU-8a2f", "MIG-77"]),
])
def test_a_process_may_use_the_devices_that_it_is_shown(given: str, expected: list[str], tmp_path: Path) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": given}, dev=tmp_path) == expected


def test_devices_are_counted_by_their_files_whatever_their_numbers(tmp_path: Path) -> None:
    assert visible_devices({}, dev=tmp_path) == [] and not has_devices(tmp_path)
    for name in ("nvidia3", "nvidia7", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_devices({}, dev=tmp_path) == ["0", "1"] and has_devices(tmp_path)


def test_a_device_of_another_make_is_seen_but_not_counted(tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    assert visible_devices({}, dev=tmp_path) == [] and has_devices(tmp_path)


@pytest.mark.parametrize(("visible", "expected"), [
    ("0,1,2", Device("Tesla V100", 32768 * 2**20, has_bf16=False, has_fp8=False)),
    ("0", Device("NVIDIA H100 80GB HBM3", 81559 * 2**20, has_bf16=True, has_fp8=True)),
    ("GPU-bbb", Device("NVIDIA A100", 40960 * 2**20, has_bf16=True, has_fp8=False)), ("7", None), ("", None)])
def test_the_visible_device_with_the_least_memory_is_described_by_its_driver(
    visible: str, expected: Device | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-aaa1, NVIDIA H100 80GB HBM3, 81559, 9.0'\necho '1, GPU-bbb2, NVIDIA A100, 40960, 8.0'\n"
                   "echo '2, GPU-ccc3, Tesla V100, 32768, 7.0'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert smallest_device({"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert smallest_device({"CUDA_VISIBLE_DEVICES": "0"}) is None
