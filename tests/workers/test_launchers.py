"""One contract for both launchers: calls, errors, deaths, deadlines, environment, root causes, and nothing left behind."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from offbeat.errors import ConfigError, DeadlineError, DeathError, MachineError, PeerError, StuckError, SyncTimeout, WorkerError
from offbeat.ranks.ranks import start_ranks
from offbeat.sync.platform import current_platform
from offbeat.workers.local import LocalLauncher
from offbeat.workers.ray import RayLauncher
from offbeat.workers.worker import Launcher, Nothing, Worker, WorkerSpec, ask_all, make_launcher
from small_run import small_config
from support.services import Order
from waiting import until

LAUNCHERS = ["local", pytest.param("ray", marks=pytest.mark.ray)]
SUPPORT = os.pathsep.join(filter(None, (str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH"))))


def make(kind: str) -> Launcher:
    if kind == "local":
        return LocalLauncher(stop_timeout_s=30)
    return RayLauncher(address="", num_cpus=4, start_timeout_s=60, stop_timeout_s=30)


def check(kind: str, tmp_path: Path, body: Callable[[Launcher, Callable[[str, str], Awaitable[Worker]]], Awaitable[None]]) -> None:
    async def start(launcher: Launcher, name: str, target: str) -> Worker:
        spec = WorkerSpec(name, target, tmp_path / f"{name}.log", threads=1, env={"PYTHONPATH": SUPPORT, "MARK": name})
        return await launcher.start(spec, timeout_s=60)

    async def main() -> None:
        async with make(kind) as launcher:
            await body(launcher, lambda name, target: start(launcher, name, target))

    before = {p.pid for p in psutil.Process().children(recursive=True)}
    try:
        asyncio.run(main())
    finally:
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before and p.status() != psutil.STATUS_ZOMBIE]
        psutil.wait_procs(left, timeout=30)
        assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_start_that_takes_too_long_names_the_setting(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalLauncher(stop_timeout_s=30) as launcher:
            await launcher.start(WorkerSpec("slow", "handlers:Echo", tmp_path / "slow.log", threads=1), timeout_s=0.001)

    with pytest.raises(DeadlineError, match="slow to start passed its deadline") as late:
        asyncio.run(main())
    assert any("cluster.start_timeout_s" in note for note in late.value.__notes__)


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_what_workers_write_is_as_private_as_what_the_controller_writes(kind: str, tmp_path: Path) -> None:
    async def body(_: Launcher, start: Callable[[str, str], Awaitable[Worker]]) -> None:
        before = os.umask(0o077)  # after Ray has started, whose nodes have one of their own
        try:
            await start("private", "handlers:Echo")
        finally:
            os.umask(before)
        assert (tmp_path / "private.log").stat().st_mode & 0o777 == 0o600

    check(kind, tmp_path, body)


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_launcher_keeps_the_contract(kind: str, tmp_path: Path) -> None:
    async def body(launcher: Launcher, start: Callable[[str, str], Awaitable[Worker]]) -> None:
        first, second = await asyncio.gather(start("first", "handlers:Echo"), start("second", "handlers:Echo"))
        payload = os.urandom(300_000)
        assert await first.call("echo", payload, timeout_s=60) == payload
        assert await second.call("env", b"MARK", timeout_s=60) == b"second"
        assert await second.call("env", b"OMP_WAIT_POLICY", timeout_s=60) == b"passive"
        pids = [int(await worker.call("pid", timeout_s=60)) for worker in (first, second)]
        assert len({os.getpid(), *pids}) == 3
        with pytest.raises(ConfigError, match="x must be 1, got 2"):
            await first.call("ours", timeout_s=60)
        with pytest.raises(WorkerError, match="first failed in nothing: KeyError"):
            await first.call("nothing", timeout_s=60)
        with pytest.raises(DeadlineError, match="sleep on first passed its deadline") as late:
            await first.call("sleep", b"3", timeout_s=1.0)
        assert "time.sleep(float(payload))" in late.value.__notes__[0]
        with pytest.raises(DeathError, match=rf"second \(process {pids[1]}\) exited with code 7 in exit") as dead:
            await second.call("exit", timeout_s=60)
        assert "last words" in dead.value.__notes__[0]
        assert not second.alive
        with pytest.raises(DeathError, match="exited with code 7 before echo"):
            await second.call("echo", timeout_s=60)
        third = await start("third", "handlers:Echo")
        os.kill(int(await third.call("pid", timeout_s=60)), signal.SIGKILL)
        await until(lambda: not third.alive)
        with pytest.raises(DeathError, match="was killed by SIGKILL before echo"):
            await third.call("echo", timeout_s=60)
        with pytest.raises(WorkerError, match="no model here"):
            await start("broken", "handlers:Broken")
        await first.stop(timeout_s=30)

    check(kind, tmp_path, body)


async def act(
    workers: list[Worker], *orders: Order, timeout_s: float = 60, patience_s: float | None = None,
) -> tuple[Exception, list[str]]:
    """What all workers' failing came to, and its notes of one line."""
    with pytest.raises(Exception) as caught:
        await ask_all(workers, "act", orders, Nothing, timeout_s=timeout_s, patience_s=patience_s)
    return caught.value, [note for note in getattr(caught.value, "__notes__", []) if "\n" not in note]


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_failures_are_told_by_their_root_cause_and_stuck_workers_are_not_waited_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offbeat.workers.worker._GRACE_S", 1.0)
    failed_at_s = float("inf")

    async def body(launcher: Launcher, start: Callable[[str, str], Awaitable[Worker]]) -> None:
        nonlocal failed_at_s
        workers = list(await asyncio.gather(*(start(f"rank {rank}", "services:Actor") for rank in range(4))))
        assert await ask_all(workers, "act", [Order("nothing")] * 4, Nothing, timeout_s=60) == [Nothing()] * 4

        error, notes = await act(workers[:3], Order("raise peer error"), Order("raise", 0.8), Order("nothing"))
        assert str(error) == "rank 1 failed in act: ValueError: no such token"
        assert notes == ["rank 0: rank 1 failed at 'save'"]

        told = tmp_path / "the verdict was told"
        error, notes = await act(workers[:3], Order("raise verdict", 0.1), Order(f"wait {told}"), Order("raise verdict"))
        assert isinstance(error, SyncTimeout) and str(error).startswith("rank 1 did not come to 'save'")
        assert notes == ["rank 1: had not answered act"]
        told.touch()

        # Whose collective breaks is a victim of who is elsewhere.
        told = tmp_path / "the broken collective was told"
        error, notes = await act(workers[:2], Order("break", 0.1), Order(f"wait {told}"))
        assert isinstance(error, PeerError)
        assert str(error) == (
            "rank 1 made no progress in act, so that a collective of the others broke"
            " (rank 0 failed in act: RuntimeError: [gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 40000ms)")
        assert any("time.sleep(0.01)" in note for note in error.__notes__)
        told.touch()

        # A missed deadline of the caller's shows what every worker was doing.
        orders = Order("sleep"), Order("stop", 0.5), Order("hold the interpreter"), Order("nothing")
        error, _ = await act(workers, *orders, timeout_s=4.5)
        assert isinstance(error, DeadlineError)
        told = "\n".join(error.__notes__)
        assert re.search(r"stack of rank 0:\n(.*\n)*.*time.sleep\(60\)", told)
        assert re.search(r"rank 1 \(process \d+\) does not answer: it is stopped by a signal \(SIGSTOP\)", told)
        assert re.search(r"rank 2 \(process \d+\) does not answer: native code holds its interpreter lock; it is sleeping, after", told)

        started_s = time.monotonic()
        error, notes = await act(workers[1:2], Order("nothing"), timeout_s=60, patience_s=1.0)
        assert isinstance(error, StuckError) and time.monotonic() - started_s < 30
        assert re.fullmatch(r"rank 1 is stopped by a signal \(SIGSTOP or a debugger\), for \d+\.\d s in 'act'", str(error))

        error, notes = await act(workers[3:], Order("die"))
        assert re.fullmatch(r"rank 3 \(process \d+\) was killed by SIGKILL in act", str(error)) and not notes
        failed_at_s = time.monotonic()
        raise error

    with pytest.raises(DeathError):
        check(kind, tmp_path, body)
    assert time.monotonic() - failed_at_s < 18, "stuck workers were waited for"


def test_devices_are_dealt_out_in_order_from_those_the_user_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def visible(launcher: LocalLauncher, name: str, num_devices: int) -> bytes:
        spec = WorkerSpec(name, "handlers:Echo", tmp_path / "w.log", num_devices=num_devices, env={"PYTHONPATH": SUPPORT})
        return await (await launcher.start(spec, timeout_s=60)).call("env", b"CUDA_VISIBLE_DEVICES", timeout_s=60)

    async def body() -> None:
        async with LocalLauncher(stop_timeout_s=30) as launcher:
            assert [await visible(launcher, *worker) for worker in (("a", 1), ("b", 0), ("c", 1))] == [b"3", b"", b"5"]
            assert await visible(launcher, "a", 1) == b"3"  # started anew, it has what it had
            with pytest.raises(ConfigError, match="'3,5' shows 2"):
                await visible(launcher, "d", 1)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    asyncio.run(body())


def deal(launcher: LocalLauncher, *counts: int) -> list[str]:
    return [",".join(launcher._deal(count)) for count in counts]


def test_engines_of_several_devices_overlap_with_nobody_unless_devices_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    assert deal(LocalLauncher(stop_timeout_s=1), 1, 1, 2, 2) == ["0", "1", "2,3", "4,5"]
    assert deal(LocalLauncher(stop_timeout_s=1, devices_taken=2), 4) == ["2,3,4,5"]
    with pytest.raises(ConfigError, match=r"need 7 or more devices, but CUDA_VISIBLE_DEVICES = '0,1,2,3,4,5' shows 6; set cluster.share_d"):
        deal(LocalLauncher(stop_timeout_s=1), 4, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    shared = LocalLauncher(stop_timeout_s=1, share_devices=True)
    assert deal(shared, 1, 1, 1, 2) == ["4", "6", "4", "6,4"]
    with pytest.raises(ConfigError, match="shows 2"):
        deal(shared, 3)


def test_a_rank_that_was_promised_a_device_and_has_none_says_so(tmp_path: Path, model_dir: str) -> None:
    if current_platform.device_type != "cpu":
        pytest.skip("this machine has an accelerator")
    config = small_config(tmp_path, train__devices_per_rank="1", train__threads="1")

    async def main() -> None:
        async with LocalLauncher(stop_timeout_s=1) as launcher:
            await start_ranks(launcher, config.for_ranks, model=model_dir, build=None, log_dir=tmp_path)

    with pytest.raises(MachineError, match="assigned 1 accelerator, and torch .* finds none, where CUDA_VISIBLE_DEVICES = '0'") as caught:
        asyncio.run(main())
    assert caught.value.exit_code == 2 and caught.value.__notes__[-1] == "rank 0 raised it in join"


def test_the_launcher_is_the_configured_one(tmp_path: Path) -> None:
    assert isinstance(make_launcher(small_config(tmp_path).for_launcher), LocalLauncher)
