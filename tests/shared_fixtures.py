"""The fixtures of all tests: what is slow to make and shared, and what a test must not leave behind. `conftest.py` registers them."""

import fcntl
import json
import logging
import os
import random
import signal
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from faults.workshop import workshop
from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from small_run import SmallRun, build_small_model, offbeat, start_offbeat
from waiting import wait_until

# The same examples at every run, however slow the machine is.
settings.register_profile("offbeat", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("offbeat")


@pytest.fixture(autouse=True)
def _seed():
    """What a test draws without a seed of its own is the same whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _restore_logging():
    """Commands that run in this process send its log records into their run's folder, which may be gone when the next test logs."""
    loggers = logging.getLogger(), logging.getLogger("offbeat")
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        for handler in set(logger.handlers) - set(handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)


@pytest.fixture(scope="session")
def make_once(tmp_path_factory):
    """Makes what all processes of a test run share: `make(folder)` is called by the first that asks for `name`, and its JSON by all.

    The others wait meanwhile. If it fails, the next one tries again, in a new folder.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def once(name, make):
        note = shared / f"{name}.json"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not note.exists():
                made = make(Path(tempfile.mkdtemp(prefix=f"{name}-", dir=shared)))
                note.write_text(json.dumps(made))
        return json.loads(note.read_text())

    return once


@pytest.fixture(scope="session")
def model_dir(make_once):
    """Folder of a random model of one layer with its character tokenizer."""
    return make_once("model", partial(build_small_model, seed=1))


@pytest.fixture
def start_engine(model_dir):
    """Starts an engine in threads of this process, with the given options; gives its server and URL. All end with the test."""
    servers = []

    def start(**options):
        server = EngineServer(EngineOptions(**{"model": model_dir} | options))
        servers.append(server)
        return server, server.start()

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def shop(tmp_path_factory, model_dir):
    """Two ranks, an engine and a reward process, on which whole runs take a second each."""
    with workshop(tmp_path_factory.mktemp("shop"), model_dir, num_ranks=2) as shop:
        yield shop


def _restore(root, model_dir, done):
    """A run that a process has made, with what its command came to."""
    return SmallRun(Path(root), model_dir, subprocess.CompletedProcess(*done))


@pytest.fixture(scope="session")
def finished_run(make_once, model_dir):
    """A run of two steps by `offbeat train`, in processes of its own. Tests only read it."""
    def make(root):
        done = offbeat("train", *SmallRun(root, model_dir).arguments(checkpoint__journal_keep="all"), "--json")
        assert done.returncode == 0, done.stderr
        return str(root), model_dir, (done.args, done.returncode, done.stdout, done.stderr)

    return _restore(*make_once("finished", make))


@pytest.fixture(scope="session")
def stopped_run(make_once, model_dir):
    """A long run that was interrupted once while it trained. Tests copy it before they go on with it."""
    def make(root):
        run = SmallRun(root, model_dir)
        with start_offbeat("train", *run.arguments(run__total_steps="100000"), "--json") as process:
            wait_until(lambda: len(run.metrics()) > 2 or process.poll() is not None, timeout_s=120)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
        return str(root), model_dir, (process.args, process.returncode, stdout, stderr)

    return _restore(*make_once("stopped", make))
