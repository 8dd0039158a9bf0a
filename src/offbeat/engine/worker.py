"""The process of one embedded engine: serves HTTP from a thread and answers the controller's start call. Torch is imported here."""

from offbeat.data import wire
from offbeat.engine.options import EngineAddress, EngineOptions, EngineStart
from offbeat.engine.server import EngineServer
from offbeat.workers.worker import Nothing, WorkerService


class EngineWorker(WorkerService):
    """The service of one engine process."""

    def __init__(self) -> None:
        self._server: EngineServer | None = None

    def start(self, request: EngineStart) -> EngineAddress:
        self._server = EngineServer(wire.decode_json(EngineOptions, request.options))
        return EngineAddress(self._server.start(host=request.host, port=request.port))

    def ping(self, request: Nothing) -> Nothing:
        return request
