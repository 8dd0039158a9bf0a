"""A real server, started from Offbeat's environment, for real SDK clients; these tests run in the SDK's own.

    make test-tinker
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker

sys.path.insert(0, str(Path(__file__).parent))

from server import MODEL_NAME, Server
from small_model import build_model

Clients = Callable[..., tinker.ServiceClient]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with a character tokenizer, in a folder named as clients call it."""
    return build_model(tmp_path_factory.mktemp("base") / MODEL_NAME)


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that do not break it."""
    with Server(model_dir, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def connect(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    """Makes SDK clients of an owner."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    opened: list[tinker.ServiceClient] = []

    def open_client(owner: str = "alice") -> tinker.ServiceClient:
        opened.append(tinker.ServiceClient(base_url=server.url, api_key=f"tml-{owner}"))
        return opened[-1]

    yield open_client
    for client in opened:
        if hasattr(client, "close"):
            client.close("success")
