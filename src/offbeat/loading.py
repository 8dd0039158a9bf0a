"""Imports modules by name that bring large libraries along: a command, the handler of a child process, the modules of a run's mode.

The garbage collector would walk all loaded objects again and again, for a sixth of the time that loading takes, and once more, for a
second, when the process ends. None of them is ever freed, so the collector rests meanwhile and then leaves them alone.
"""

import gc
import importlib
import sys
import threading
from types import ModuleType


class _Collector:
    """The garbage collector of this process, which several threads may want to rest at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_resting = 0
        self._was_enabled = False

    def rest(self) -> None:
        with self._lock:
            if not self._num_resting:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_resting += 1

    def work_again(self) -> None:
        """End a rest; after the last one the collector is as it was before the first."""
        with self._lock:
            self._num_resting -= 1
            if not self._num_resting and self._was_enabled:
                gc.enable()


_COLLECTOR = _Collector()


def load_module(name: str) -> ModuleType:
    """Import a module by its full name, e.g. "offbeat.cli.main". If it was new, exempt all present objects from garbage collection."""
    if name in sys.modules:
        return sys.modules[name]
    _COLLECTOR.rest()
    try:
        module = importlib.import_module(name)
        gc.freeze()
        return module
    finally:
        _COLLECTOR.work_again()
