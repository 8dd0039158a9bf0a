"""Counts sampled tokens from inside the processes of a run: Python imports it at start, as its folder is in PYTHONPATH.

Each decode step of an engine appends the keys and the positions of the tokens that it has sampled for training to a file of the engine's
process, before anybody else sees a token. A write survives SIGKILL, so the count is exact. A key belongs to one sample of one prompt, so
that a pair that is there twice is a token that was generated twice (`chaos.tokens` reads the files).
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_MODULE = "offbeat.engine.rows"


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the module be changed when it has been imported, which only engines do."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_count(module: ModuleType) -> None:
                execute(module)
                _count(module)

            spec.loader.exec_module = execute_and_count
        return spec


def _count(module: ModuleType) -> None:
    np = module.np
    append = module.Rows.append
    file = os.open(f"{os.environ['OFFBEAT_COUNT_TOKENS']}/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def counted(self: Any, drawn: Any, *, version: int) -> Any:
        num = len(self)
        own = np.flatnonzero(self._temperature[:num] > 0)
        positions = self.length[:num] - self._prompt_len[:num] + self._num_begun[:num]
        os.write(file, np.stack([self._key[own], positions[own].astype(np.uint64)], axis=1).tobytes())
        return append(self, drawn, version=version)

    module.Rows.append = counted


if "OFFBEAT_COUNT_TOKENS" in os.environ:
    sys.meta_path.insert(0, _Finder())
