"""Imports modules by name that bring large libraries along: a command, the handler of a child process, the modules of a run's mode.

The garbage collector would walk all loaded objects again and again, for a sixth of the time that loading takes, and once more, for a
second, when the process ends. None of them is ever freed, so the collector rests meanwhile and then leaves them alone.
"""

import gc
import importlib
import sys
from types import ModuleType


def load_module(name: str) -> ModuleType:
    """Import a module by its full name, e.g. "offbeat.cli.main". If it was new, exempt all present objects from garbage collection."""
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
