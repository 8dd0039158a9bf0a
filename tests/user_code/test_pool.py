"""One pool for all processes of user code: places, replacement, environment, logs. Roles have tests of their own."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from offbeat.errors import DeathError
from offbeat.user_code.handshake import enter
from offbeat.user_code.pool import CodePool, CodeRole

ROLE = CodeRole("code {}", "user_code.test_pool:Handler", log="code-{}.log", load=b"hello", variables={"PYTHONPATH": str(
    Path(__file__).parents[1])})


class Handler:
    """Answers with its environment, or ends its process."""

    def handle(self, method: str, payload: bytes) -> bytes:
        match method:
            case "load":
                return enter(payload).load
            case "exit":
                os._exit(3)
        return os.environ.get(payload.decode(), "").encode()


async def ask(pool: CodePool, method: str, payload: str = "") -> bytes:
    async with pool.place() as index:
        process = await pool.process(index)
        async with pool.ending_on_error(process):
            return await process.child.call(method, payload.encode(), timeout_s=60)


def test_a_process_that_ends_is_replaced_and_none_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")

    async def main() -> None:
        async with CodePool(ROLE, num_processes=1, log_dir=tmp_path) as pool:
            assert pool.loaded == b"hello" and "MY_API_KEY" in pool.hidden
            assert await ask(pool, "variable", "MY_API_KEY") == b""
            with pytest.raises(DeathError, match="code 0 .* exited with code 3"):
                await ask(pool, "exit")
            assert await ask(pool, "variable", "OMP_NUM_THREADS") == b"1"
            assert "127.0.0.1" in (await ask(pool, "variable", "NO_PROXY")).decode()

    before = set(psutil.Process().children())
    asyncio.run(main())
    assert not set(psutil.Process().children()) - before and (tmp_path / "code-0.log").exists()


def test_callers_are_spread_over_processes_and_have_one_for_themselves() -> None:
    async def main() -> list[list[int]]:
        pool, held = CodePool(ROLE, num_processes=2), [[0, 0], [0, 0]]  # now and at most, of each process

        async def use() -> None:
            async with pool.place() as index:
                held[index][0] += 1
                held[index][1] = max(held[index])
                await asyncio.sleep(0.01)
                held[index][0] -= 1

        await asyncio.gather(*(use() for _ in range(6)))
        return held

    assert asyncio.run(main()) == [[0, 1], [0, 1]]
