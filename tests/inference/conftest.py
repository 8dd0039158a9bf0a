"""Real engines on the small model: three, in threads of this process."""

from collections.abc import Callable, Iterator

import pytest

from offbeat.inference.embedded.options import EngineOptions
from offbeat.inference.embedded.server import EngineServer

StartEngine = Callable[..., tuple[EngineServer, str]]


@pytest.fixture
def start_engine(model_dir: str) -> Iterator[StartEngine]:
    """Starts an engine with the given options; gives its server and URL. All end with the test."""
    servers: list[EngineServer] = []

    def start(**options: object) -> tuple[EngineServer, str]:
        server = EngineServer(EngineOptions(**{"model": model_dir} | options))
        servers.append(server)
        return server, server.start()

    yield start
    for server in servers:
        server.stop()
