"""Large bodies are read beside the event loop, an owner's one after the other."""

import asyncio
import threading
import time

from offbeat.service.app.readers import Readers
from waiting import until


def test_an_owners_readings_take_turns_and_others_do_not_wait_for_them() -> None:
    async def body() -> None:
        readers, running, most = Readers(), 0, 0
        end, started = threading.Event(), []

        def read(owner: str) -> str:
            nonlocal running, most
            assert threading.current_thread() is not threading.main_thread()
            started.append(owner)
            if owner == "mallory":
                running += 1
                most = max(most, running)
                end.wait(10)
                running -= 1
            return owner

        many = [asyncio.create_task(readers.run("mallory", read, "mallory")) for _ in range(5)]
        await until(lambda: bool(started))
        assert await readers.run("alice", read, "alice") == "alice" and started == ["mallory", "alice"]
        end.set()
        assert await asyncio.gather(*many) == ["mallory"] * 5 and most == 1
        assert not len(readers._turns)

    asyncio.run(body())


def test_the_event_loop_goes_on_while_a_body_is_read() -> None:
    async def body() -> None:
        ticks = 0
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(Readers().run("mallory", _compute))
            while not reading.done():
                await asyncio.sleep(0.001)
                ticks += 1
        assert reading.result() and ticks > 2

    asyncio.run(body())


def _compute() -> bool:
    begin = time.thread_time()
    while time.thread_time() - begin < 0.2:
        sum(range(1000))
    return True
