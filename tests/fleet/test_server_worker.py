"""A server of another make and the process that owns it: they start and end together. A small server stands in for vLLM."""

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from offbeat.data import wire
from offbeat.engine.options import EngineAddress
from offbeat.errors import DeathError, EngineError, MachineError
from offbeat.fleet.server_worker import ServerStart, ServerWorker
from offbeat.machine import PROMISED_DEVICES, has_devices
from offbeat.process.child import Child
from offbeat.workers.local import LocalLauncher
from offbeat.workers.worker import Worker, WorkerSpec, ask
from waiting import until

SERVER = Path(__file__).parents[1] / "support" / "health_server.py"


def request(*flags: str, timeout_s: float = 60) -> ServerStart:
    return ServerStart((sys.executable, str(SERVER), *flags), {"MARK": "1"}, "127.0.0.1", timeout_s)


@asynccontextmanager
async def worker_of(log: Path) -> AsyncIterator[Child]:
    async with LocalLauncher(stop_timeout_s=5) as launcher:
        worker = await launcher.start(WorkerSpec("engine 0", "offbeat.fleet.server_worker:ServerWorker", log), timeout_s=60)
        assert isinstance(worker, Child)
        yield worker


async def start(worker: Worker) -> tuple[psutil.Process, psutil.Process, Path]:
    """The server, its child, and its shared memory."""
    url = (await ask(worker, "start", request(), EngineAddress, timeout_s=60)).url
    child, memory = _read(f"{url}/health").split()
    process = psutil.Process(int(child))
    server = process.parent()
    assert server is not None and server.environ()["MARK"] == "1"
    return server, process, Path("/dev/shm") / memory


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


def gone(*processes: psutil.Process) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_a_server_is_asked_directly_and_asks_itself_directly_beside_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with worker_of(tmp_path / "log") as worker:
            server, *_ = await start(worker)
            assert server.environ()["NO_PROXY"] == "127.0.0.1,localhost"

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setattr(sys.modules[__name__], "_read", lambda url: urllib.request.build_opener(
        urllib.request.ProxyHandler({})).open(url, timeout=60).read().decode())
    asyncio.run(main())


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_server_ends_with_its_worker_and_leaves_nothing(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        async with worker_of(tmp_path / "log") as worker:
            server, child, memory = await start(worker)
            assert memory.exists()
            if how == "killed":
                os.kill(worker.pid, signal.SIGKILL)
            else:
                os.kill(server.pid, signal.SIGSTOP)  # a server that hangs ends, too
                await worker.stop(timeout_s=5)
            await until(lambda: gone(server, child) and not memory.exists())

    asyncio.run(main())


def test_a_worker_ends_with_its_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker_of(tmp_path / "log") as worker:
            server, child, memory = await start(worker)
            server.kill()
            await until(lambda: not worker.alive and gone(child) and not memory.exists())

    asyncio.run(main())


def test_a_server_that_ends_while_it_starts_is_told_with_its_last_words(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker_of(tmp_path / "log") as worker:
            with pytest.raises(DeathError, match="engine 0 .* exited with code 1 in start") as told:
                await ask(worker, "start", request("--fail"), EngineAddress, timeout_s=60)
            assert "RuntimeError: this model is unknown" in "".join(told.value.__notes__)

    asyncio.run(main())


def test_a_server_that_is_never_ready_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker_of(tmp_path / "log") as worker:
            with pytest.raises(EngineError, match="did not answer within 1 s; .*inference.start_timeout_s"):
                await ask(worker, "start", request("--never-ready", timeout_s=1), EngineAddress, timeout_s=60)

    asyncio.run(main())


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker_of(tmp_path / "log") as worker:
            with pytest.raises(EngineError, match="/no/python cannot be executed: No such file"):
                await ask(worker, "start", ServerStart(("/no/python",), {}, "127.0.0.1", 1), EngineAddress, timeout_s=60)

    asyncio.run(main())


def test_a_server_that_was_promised_a_device_is_not_started_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    if has_devices():
        pytest.skip("this machine has an accelerator")
    monkeypatch.setenv(PROMISED_DEVICES, "2")
    with pytest.raises(MachineError, match="assigned inference.devices_per_engine = 2, and this machine has no accelerator"):
        ServerWorker().start(ServerStart(("/no/python",), {}, "127.0.0.1", 1))


def test_the_message_comes_back_equal():
    message = ServerStart(("python", "-m", "server"), {"A": "1"}, "127.0.0.1", 5.0, "the-key")
    assert wire.decode(ServerStart, wire.encode(message)) == message
