"""Imports modules by name that bring large libraries along: a command, the handler of a child process, what a run's mode needs.

The garbage collector would walk all that the libraries have loaded so far again and again, for a sixth of the time that loading takes, and
once more, for a second, when the process ends. None of it is ever freed, so the collector rests meanwhile and then leaves it alone.
"""

import gc
import importlib
import sys
from types import ModuleType


def load_module(name: str) -> ModuleType:
    """Import a module by its full name, and exempt what is in memory then from garbage collection, unless it had been imported before."""
    if name in sys.modules:
        return sys.modules[name]
    enabled = gc.isenabled()
    gc.disable()
    try:
        module = importlib.import_module(name)
        gc.freeze()
        return module
    finally:
        if enabled:
            gc.enable()
