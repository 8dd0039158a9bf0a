"""Children: calls, errors, deadlines, deaths and the lifeline."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import uvloop

from offbeat.errors import ConfigError, DeadlineError, StuckError, WorkerError
from offbeat.process.child import Child, ChildSpec
from waiting import wait_until

SUPPORT = str(Path(__file__).parents[1] / "support")
ENV = {"PYTHONPATH": os.pathsep.join(filter(None, (SUPPORT, os.environ.get("PYTHONPATH")))), "MARK": "here"}


def spec(log: Path | None = None, target: str = "handlers:Echo") -> ChildSpec:
    return ChildSpec("worker 3", target, ENV, log)


async def start(log: Path | None = None) -> Child:
    return await Child.start(spec(log), timeout_s=60)


def test_calls_return_what_the_handler_returns_even_when_large() -> None:
    async def body() -> None:
        child = await start()
        big = os.urandom(5_000_000)
        assert await child.call("echo", big, timeout_s=60) == big
        assert await child.call("env", b"MARK", timeout_s=60) == b"here"
        assert await asyncio.gather(*(child.call("echo", bytes([i]), timeout_s=60) for i in range(50))) == [bytes([i]) for i in range(50)]
        await child.stop(timeout_s=60)
        assert not psutil.pid_exists(child.pid)

    asyncio.run(body())


def test_pieces_arrive_as_a_whole_with_others_behind_them_bit_by_bit() -> None:
    async def body() -> None:
        child = await start()
        big = os.urandom(3_000_000)
        pieces = [b"head", memoryview(big), b"", memoryview(big)[:5], b"tail"]
        held = []

        async def look() -> None:
            while True:
                await asyncio.sleep(0)
                held.append(child._writer.transport.get_write_buffer_size())

        looking = asyncio.create_task(look())
        assert await asyncio.gather(
            child.call("echo", pieces, timeout_s=60), child.call("echo", b"small", timeout_s=60), child.call("echo", pieces, timeout_s=60),
        ) == [b"".join(pieces), b"small", b"".join(pieces)]
        looking.cancel()
        assert max(held) <= 1 << 20, "what the socket has not taken is copied, so it is handed over bit by bit"
        await child.kill()

    asyncio.run(body())


def test_a_child_that_dies_while_much_is_sent_to_it_is_told() -> None:
    async def body() -> None:
        child = await start()
        with pytest.raises(WorkerError, match="exited with code 7"):
            await asyncio.gather(child.call("exit", timeout_s=60), child.call("echo", [memoryview(bytes(40_000_000))], timeout_s=60))
        assert not child.alive
        await child.kill()

    asyncio.run(body())


def test_calls_that_are_sent_at_once_each_have_their_deadline_from_the_answer_before() -> None:
    async def body() -> None:
        child = await start()
        assert [a async for a in child.call_each("echo", [b"1", b"2", b"3"], timeout_s=60)] == [b"1", b"2", b"3"]
        assert len([a async for a in child.call_each("sleep", [b"0.3"] * 5, timeout_s=1.4)]) == 5  # 1.5 s altogether
        answers = []
        with pytest.raises(DeadlineError, match="sleep on worker 3 passed its deadline of 1 s"):
            async for answer in child.call_each("sleep", [b"0", b"60", b"0"], timeout_s=1.0):
                answers.append(answer)
        assert len(answers) == 1
        await child.kill()
        with pytest.raises(WorkerError, match="was killed by SIGKILL before echo"):
            [a async for a in child.call_each("echo", [b"1"], timeout_s=60)]

    asyncio.run(body())


def test_a_child_gets_its_parents_variables_but_those_that_are_kept_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "7")
    monkeypatch.setenv("PLAIN", "8")
    spec = ChildSpec("w", "handlers:Echo", ENV | {"PLAIN": "9"}, without=frozenset({"A_SECRET", "PLAIN"}))

    async def main() -> list[bytes]:
        child = await Child.start(spec, timeout_s=60)
        try:
            return [await child.call("env", name, timeout_s=60) for name in (b"A_SECRET", b"PLAIN", b"HOME")]
        finally:
            await child.kill()

    assert asyncio.run(main()) == [b"", b"9", os.environ.get("HOME", "").encode()]


def test_our_errors_cross_as_themselves_and_others_name_the_worker() -> None:
    async def body() -> None:
        child = await start()
        with pytest.raises(ConfigError, match="x must be 1, got 2"):
            await child.call("ours", timeout_s=60)
        with pytest.raises(WorkerError, match="worker 3 failed in nothing: KeyError") as caught:
            await child.call("nothing", timeout_s=60)
        assert "handlers.py" in caught.value.__notes__[0]
        await child.stop(timeout_s=60)

    asyncio.run(body())


def test_a_missed_deadline_names_the_call_and_shows_the_stack() -> None:
    async def body() -> None:
        child = await start()
        with pytest.raises(DeadlineError, match="sleep on worker 3 passed its deadline of 1 s") as caught:
            await child.call("sleep", b"60", timeout_s=1.0)
        assert "time.sleep(float(payload))" in caught.value.__notes__[0]
        await child.kill()

    asyncio.run(body())


def test_a_death_fails_all_calls_with_exit_code_and_last_log_lines(tmp_path: Path) -> None:
    async def body() -> None:
        child = await start(tmp_path / "w.log")
        waiting = asyncio.create_task(child.call("sleep", b"0.2", timeout_s=60))
        await waiting
        with pytest.raises(WorkerError, match="exited with code 7") as caught:
            await child.call("exit", timeout_s=60)
        assert "last words" in caught.value.__notes__[0]
        with pytest.raises(WorkerError, match="exited with code 7"):
            await child.call("echo", timeout_s=60)

    asyncio.run(body())


def test_a_second_answer_to_a_call_is_dropped_and_the_process_goes_on() -> None:
    async def body() -> None:
        child = await Child.start(spec(target="handlers:Unruly"), timeout_s=60)
        assert await child.call("twice", timeout_s=60) == b"first"
        assert await child.call("echo", b"next", timeout_s=60) == b"next"
        assert child.alive
        await child.stop(timeout_s=60)

    asyncio.run(body())


@pytest.mark.parametrize("method", ["garbage", "mute"])
def test_a_process_that_cannot_be_talked_to_any_more_is_ended_and_its_calls_fail(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.process.child._EXIT_S", 0.2)

    async def body() -> None:
        child = await Child.start(spec(target="handlers:Unruly"), timeout_s=60)
        with pytest.raises(WorkerError, match=rf"worker 3 \(process {child.pid}\) was killed by SIGKILL in {method}"):
            await child.call(method, timeout_s=60)
        with pytest.raises(WorkerError, match="before echo"):
            await child.call("echo", timeout_s=60)
        await child.kill()

    asyncio.run(body())


def test_a_signal_is_named() -> None:
    async def body() -> None:
        child = await start()
        waiting = asyncio.create_task(child.call("sleep", b"60", timeout_s=60))
        await asyncio.sleep(0.1)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            await waiting

    asyncio.run(body())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_dead_child_can_be_stopped_on_any_event_loop(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def body() -> None:
        child = await start()
        await child.kill()
        await child.stop(timeout_s=60)
        assert not child.alive

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(body())


def test_a_failed_start_shows_the_first_real_error() -> None:
    async def body() -> None:
        with pytest.raises(WorkerError, match="RuntimeError: no model here"):
            await Child.start(spec(target="handlers:Broken"), timeout_s=60)

    asyncio.run(body())


@pytest.mark.parametrize("busy", ["sleep", "hold"])
def test_children_end_when_the_parent_is_killed(busy: str) -> None:
    script = (
        "import asyncio\n"
        "from offbeat.process.child import Child, ChildSpec\n"
        "async def main():\n"
        f"    child = await Child.start(ChildSpec('w', 'handlers:Echo', {ENV!r}), timeout_s=60)\n"
        "    print(child.pid, flush=True)\n"
        f"    await child.call({busy!r}, b'60', timeout_s=60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        parent.kill()
    wait_until(lambda: not psutil.pid_exists(pid), timeout_s=30)


def test_a_child_that_hangs_says_so_itself_and_is_asked_again_when_it_goes_on() -> None:
    async def body() -> None:
        child = await Child.start(spec(target="handlers:Watched"), timeout_s=60)
        with pytest.raises(StuckError, match="^rank 1 hangs in 'hang'$"):
            await child.call("hang", b"2", timeout_s=60)
        assert await child.call("echo", b"next", timeout_s=60) == b"next"  # what the first call gave was dropped
        await child.kill()

    asyncio.run(body())


def test_a_child_that_is_stopped_in_a_call_is_named_when_the_patience_ends_and_in_another_not_at_all() -> None:
    async def body() -> None:
        child = await Child.start(spec(target="handlers:Watched"), timeout_s=60)
        started = time.monotonic()
        with pytest.raises(StuckError, match=(
                r"^worker 3 is stopped by a signal \(SIGSTOP or a debugger\), for \d+\.\d s in 'stop' \(the second half\)$")):
            await child.call("stop", timeout_s=60, patience_s=1.5)
        assert 1.5 < time.monotonic() - started < 30
        os.kill(child.pid, signal.SIGCONT)
        assert await child.call("echo", b"next", timeout_s=60, patience_s=1.5) == b"next"
        await child.kill()

    asyncio.run(body())


def test_a_child_whose_interpreter_is_held_is_named_when_the_patience_ends() -> None:
    async def body() -> None:
        child = await Child.start(spec(target="handlers:Watched"), timeout_s=60)
        with pytest.raises(StuckError, match=r"^worker 3 hangs in 'hold': for \d+\.\d s it has computed nothing, and native code holds"):
            await child.call("hold", b"60", timeout_s=60, patience_s=0.5)
        await child.kill()

    asyncio.run(body())
