"""Gives memory that a large pass has left behind back to the system.

The C library of a rank keeps all that is freed, for activations come and go at every layer; see `offbeat.cluster.group`. So a single large
pass would stay with the process for good. Asked once for each pass, the C library gives back what is free wherever it lies, which takes
less than the mapping of the same pages at every layer would. Called by `Trainer`.
"""

import ctypes
import sys

import psutil

SLACK_BYTES = 512 << 20
"""That a process may have grown by before anything is given back."""


class Heap:
    """This process's memory. Elsewhere than with glibc nothing is ever given back."""

    def __init__(self, *, slack_bytes: int = SLACK_BYTES) -> None:
        self._slack_bytes = slack_bytes
        self._process = psutil.Process()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        self._least_bytes = self.resident_bytes

    @property
    def resident_bytes(self) -> int:
        """Of the process."""
        return self._process.memory_info().rss

    def settle(self) -> bool:
        """Give back what is free if the process has grown by more than the slack since it last did; whether it was so."""
        if self._trim is None or self.resident_bytes <= self._least_bytes + self._slack_bytes:
            return False
        self._trim(0)
        self._least_bytes = self.resident_bytes
        return True
