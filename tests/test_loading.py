"""Large libraries are loaded without the garbage collector, which works afterwards as before."""

import builtins
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offbeat.loading import load_module

LOOKS = """
import gc, sys
from offbeat.loading import load_module
before = gc.get_freeze_count()
module = load_module("large")
assert module is sys.modules["large"] and not module.collects and gc.isenabled()
frozen = gc.get_freeze_count()
assert frozen > before
assert load_module("large") is module and gc.get_freeze_count() <= frozen
gc.disable()
load_module("wave")
assert not gc.isenabled()
"""


def test_the_collector_rests_while_a_module_is_loaded_and_leaves_it_alone_afterwards(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("import gc\ncollects = gc.isenabled()\n")
    subprocess.run([sys.executable, "-c", LOOKS], check=True, timeout=60, cwd=tmp_path)


def test_the_collector_works_again_after_a_module_that_cannot_be_loaded() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load_module("no_such_module")
    assert gc.isenabled() and gc.get_freeze_count() <= frozen


def test_the_collector_works_again_when_two_threads_have_loaded_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins while the first loads, and ends after it."""
    monkeypatch.syspath_prepend(tmp_path)
    both, first_is_done = threading.Barrier(2), threading.Event()
    monkeypatch.setattr(builtins, "both", both, raising=False)
    monkeypatch.setattr(builtins, "first_is_done", first_is_done, raising=False)
    (tmp_path / "loaded_first.py").write_text("both.wait(20)\n")
    (tmp_path / "loaded_second.py").write_text("both.wait(20)\nassert first_is_done.wait(20)\n")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(load_module, "loaded_first"), pool.submit(load_module, "loaded_second")
        first.result()
        assert not gc.isenabled()
        first_is_done.set()
        second.result()
    assert gc.isenabled()
