"""Large libraries are loaded without the garbage collector, which works afterwards as before."""

import gc
import subprocess
import sys

import pytest

from offbeat.loading import load_module

LOOKS = """
import gc, sys
from offbeat.loading import load_module
before = gc.get_freeze_count()
gc.callbacks.append(lambda *_: ran.append(1))
ran = []
module = load_module("xml.sax.expatreader")
assert module is sys.modules["xml.sax.expatreader"] and not ran and gc.isenabled()
frozen = gc.get_freeze_count()
assert frozen > before
assert load_module("xml.sax.expatreader") is module and gc.get_freeze_count() <= frozen
gc.disable()
load_module("wave")
assert not gc.isenabled()
"""


def test_the_collector_rests_while_a_module_is_loaded_and_leaves_it_alone_afterwards() -> None:
    subprocess.run([sys.executable, "-c", "import sys, gc; gc.set_threshold(1)\n" + LOOKS], check=True, timeout=60)


def test_the_collector_works_again_after_a_module_that_cannot_be_loaded() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load_module("no_such_module")
    assert gc.isenabled() and gc.get_freeze_count() <= frozen
