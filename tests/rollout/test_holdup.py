"""User code that blocks the loop, in real time: where it is told, where it is ended, and what is left alone."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable

import pytest

from offbeat.errors import CodeError
from offbeat.rollout import holdup
from offbeat.rollout.holdup import HoldupGuard
from waiting import until


def call_user_code(code: Callable[[], None]) -> None:
    code()


def guard(told: list[str], timeout_s: float = 0.2) -> HoldupGuard:
    return HoldupGuard(timeout_s=timeout_s, callers=(call_user_code.__code__,), tell=told.append)


def sleep_long() -> None:
    time.sleep(20)


def spin() -> None:
    while True:
        pass


@pytest.mark.parametrize("block", [sleep_long, spin])
def test_user_code_that_blocks_is_ended_where_it_blocks_and_the_loop_turns_again(block: Callable[[], None]) -> None:
    async def main() -> None:
        with guard([]).on():
            start = time.monotonic()
            with pytest.raises(CodeError, match=rf"held up the whole process for .* in {block.__name__}; await there"):
                call_user_code(block)
            assert time.monotonic() - start < 15
            await asyncio.sleep(0.3)

    asyncio.run(main())


def test_people_are_told_once_where_nothing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdup, "_TELL_AFTER_S", 0.1)
    told: list[str] = []

    def block_until_told() -> None:
        while not told:
            time.sleep(0.01)

    async def main() -> None:
        with guard(told, timeout_s=60).on():
            call_user_code(block_until_told)
            await asyncio.sleep(0.01)
            call_user_code(lambda: time.sleep(0.5))

    asyncio.run(main())
    assert len(told) == 1
    assert "because user code does not await at" in told[0] and "test_holdup.py, line" in told[0]


def block() -> None:
    time.sleep(0.6)


def test_our_own_code_is_left_alone_and_so_is_what_awaits() -> None:
    async def main() -> None:
        with (one := guard([])).on(), one.on():
            block()
            await asyncio.sleep(0.6)

    asyncio.run(main())


def test_user_code_has_its_whole_time_anew_whenever_the_loop_has_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdup, "_TELL_AFTER_S", 0.04)  # looks, and turns of the loop, come four times as often

    async def main() -> None:
        with (one := guard([], timeout_s=20.0)).on():
            one._num_looks = 10_000  # as after a long time in our own code
            await until(lambda: one._num_looks < 1_000)
            call_user_code(lambda: time.sleep(0.1))

    asyncio.run(main())


def test_nothing_of_it_is_left_behind() -> None:
    before, threads = signal.getsignal(signal.SIGUSR2), threading.active_count()

    async def main() -> None:
        with guard([]).on():
            assert threading.active_count() == threads + 1

    asyncio.run(main())
    assert (signal.getsignal(signal.SIGUSR2), threading.active_count()) == (before, threads)


def test_in_another_thread_it_does_nothing() -> None:
    done: list[bool] = []

    async def main() -> None:
        with guard([]).on():
            call_user_code(lambda: time.sleep(0.5))
            done.append(True)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join()
    assert done == [True]
