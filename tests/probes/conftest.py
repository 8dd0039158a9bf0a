"""A real `offbeat serve` for clients that mean harm, and speak the protocol by hand.

    make probes

Probes that leave the server as it was share one; the others start their own with `start_server`.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sdk.server import MODEL_NAME, Server
from sdk.small_model import build_model
from support.probing import Probe, StartServer, run_probe


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers, in a folder named as clients call it."""
    return build_model(tmp_path_factory.mktemp("base") / MODEL_NAME)


@pytest.fixture(scope="session")
def server(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all probes that leave it as it was."""
    with Server(served_model, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def start_server(served_model: Path, tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server with the options of `offbeat serve` that it is given; its data lie in `tmp_path / "data"`."""
    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(Server(served_model, tmp_path, *options))


@pytest.fixture
def probe(server: Server) -> Probe:
    """Runs a body that is given a client of the shared server."""
    return lambda body: run_probe(server, body)
