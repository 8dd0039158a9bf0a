"""What this machine has."""

from pathlib import Path

import psutil
import pytest

from offbeat.machine import has_devices, machine_bytes, visible_devices


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
