"""Returns memory that a large pass has freed to the system.

The C library of a rank keeps all freed memory, because activations come and go at every layer; see `offbeat.workers.worker`. So the process
would keep the memory of a single large pass for good. When asked at the start and once per pass, the C library returns free memory wherever
it is, which costs less than mapping the same pages at every layer would. Called by `Trainer`.
"""

import ctypes
import sys

import psutil

SLACK_BYTES = 512 << 20
"""Bytes by which a process may grow before memory is returned."""


class Heap:
    """This process's memory. It is returned only with glibc."""

    def __init__(self, *, slack_bytes: int = SLACK_BYTES) -> None:
        self._slack_bytes = slack_bytes
        self._process = psutil.Process()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        if self._trim is not None:
            self._trim(0)  # such as memory that loading the model took for a moment
        self._least_bytes = self.resident_bytes

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process."""
        return self._process.memory_info().rss

    def return_free(self) -> bool:
        """Return free memory if the process has grown by more than the slack since the last time; tells whether it has."""
        if self._trim is None or self.resident_bytes <= self._least_bytes + self._slack_bytes:
            return False
        self._trim(0)
        self._least_bytes = self.resident_bytes
        return True
