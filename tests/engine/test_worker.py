"""The engine's process, as a service in this one."""

import pytest

from offbeat.data import wire
from offbeat.engine.options import EngineAddress, EngineOptions, EngineStart
from offbeat.engine.worker import EngineWorker
from offbeat.errors import ModelError, PortBusyError
from offbeat.workers.worker import Nothing


def start_request(model: str, port: int = 0) -> bytes:
    return wire.encode(EngineStart(wire.encode_json(EngineOptions(model=model, version=-1)).decode(), port=port))


def test_an_engine_starts_where_it_is_told_and_answers_pings(model_dir: str) -> None:
    worker, second = EngineWorker(), EngineWorker()
    try:
        url = wire.decode(EngineAddress, worker.handle("start", start_request(model_dir))).url
        assert url.startswith("http://127.0.0.1:")
        assert wire.decode(Nothing, worker.handle("ping", wire.encode(Nothing()))) == Nothing()
        with pytest.raises(PortBusyError, match="choose another port"):
            second.handle("start", start_request(model_dir, port=int(url.rpartition(":")[2])))
    finally:
        assert worker._server is not None
        worker._server.stop()


def test_a_folder_without_a_model_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError):
        EngineWorker().handle("start", start_request(str(tmp_path)))


def test_a_method_that_is_not_there_is_refused() -> None:
    for method in ("_server", "handle", "stop"):
        with pytest.raises(LookupError, match="EngineWorker has no method"):
            EngineWorker().handle(method, b"")
