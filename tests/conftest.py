"""Lets every test import the helpers beside this file, and registers their fixtures in the processes that run tests."""

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config):
    """Load the fixtures and the libraries that they need, except where other processes run the tests (`-n 2`) and wait for this one."""
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("shared_fixtures")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What modules load stays until the end: no garbage collection has to walk it, meanwhile, in a test or when this process ends."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
