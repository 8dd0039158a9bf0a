"""What this machine has."""

import psutil

from offbeat.machine import machine_bytes


def test_memory_is_at_most_what_the_machine_has() -> None:
    assert 2**20 < machine_bytes() <= psutil.virtual_memory().total
