"""One contract for both launchers: calls, errors, deaths, deadlines, environment, and nothing left behind."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from offbeat.cluster.group import Launcher, Worker, WorkerSpec
from offbeat.cluster.local import LocalLauncher
from offbeat.cluster.ray import RayLauncher
from offbeat.errors import ConfigError, DeadlineError, WorkerError

SUPPORT = str(Path(__file__).parents[1] / "support")


def make(kind: str) -> Launcher:
    if kind == "local":
        return LocalLauncher(stop_timeout_s=5)
    return RayLauncher(address="", num_cpus=4)


def check(kind: str, tmp_path: Path, body: Callable[[Launcher, Callable[[str, str], Awaitable[Worker]]], Awaitable[None]]) -> None:
    async def start(launcher: Launcher, name: str, target: str) -> Worker:
        spec = WorkerSpec(name, target, tmp_path / f"{name}.log", threads=1, env={"PYTHONPATH": SUPPORT, "MARK": name})
        return await launcher.start(spec, timeout_s=60)

    async def main() -> None:
        async with make(kind) as launcher:
            await body(launcher, lambda name, target: start(launcher, name, target))

    before = {p.pid for p in psutil.Process().children(recursive=True)}
    asyncio.run(main())
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before and p.status() != psutil.STATUS_ZOMBIE]
    psutil.wait_procs(left, timeout=5)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_launcher_keeps_the_contract(kind: str, tmp_path: Path) -> None:
    async def body(launcher: Launcher, start: Callable[[str, str], Awaitable[Worker]]) -> None:
        first, second = await asyncio.gather(start("first", "handlers:Echo"), start("second", "handlers:Echo"))
        payload = os.urandom(300_000)
        assert await first.call("echo", payload, timeout_s=20) == payload
        assert await second.call("env", b"MARK", timeout_s=20) == b"second"
        assert await second.call("env", b"OMP_WAIT_POLICY", timeout_s=20) == b"passive"
        pids = [int(await worker.call("pid", timeout_s=20)) for worker in (first, second)]
        assert len({os.getpid(), *pids}) == 3
        with pytest.raises(ConfigError, match="x must be 1, got 2"):
            await first.call("ours", timeout_s=20)
        with pytest.raises(WorkerError, match="first failed: KeyError"):
            await first.call("nothing", timeout_s=20)
        with pytest.raises(DeadlineError, match="sleep on first passed its deadline") as late:
            await first.call("sleep", b"1", timeout_s=0.3)
        assert "time.sleep(float(payload))" in late.value.__notes__[0]
        with pytest.raises(WorkerError, match="second") as dead:
            await second.call("exit", timeout_s=20)
        assert "last words" in dead.value.__notes__[0]
        assert not second.alive
        with pytest.raises(WorkerError, match="no model here"):
            await start("broken", "handlers:Broken")
        await first.stop(timeout_s=5)

    check(kind, tmp_path, body)


def test_devices_are_dealt_out_in_order_from_those_the_user_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def visible(launcher: LocalLauncher, num_devices: int) -> bytes:
        spec = WorkerSpec("worker", "handlers:Echo", tmp_path / "w.log", num_devices=num_devices, env={"PYTHONPATH": SUPPORT})
        return await (await launcher.start(spec, timeout_s=60)).call("env", b"CUDA_VISIBLE_DEVICES", timeout_s=20)

    async def body() -> None:
        async with LocalLauncher(stop_timeout_s=5) as launcher:
            assert [await visible(launcher, count) for count in (1, 0, 1)] == [b"3", b"", b"5"]
            with pytest.raises(ConfigError, match="'3,5' shows 2"):
                await visible(launcher, 1)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    asyncio.run(body())
