"""What is given stands in for processes and connections, and nothing else is asked for them."""

import asyncio
from contextvars import copy_context
from typing import Any

from offbeat.inference.client import EngineSession
from offbeat.outside import outside
from offbeat.process.child import Child, ChildSpec


class Given:
    """Notes what was asked for."""

    def __init__(self) -> None:
        self.started: list[str] = []

    async def start_child(self, spec: Any, *, timeout_s: float) -> Any:
        assert timeout_s == 3.0
        self.started.append(spec.name)
        return "a child"

    def open_session(self) -> Any:
        return self

    async def close(self) -> None:
        self.started.append("closed")


async def use(given: Given) -> None:
    outside.set(given)
    assert await Child.start(ChildSpec("rank 0", "nowhere:Nothing"), timeout_s=3.0) == "a child"
    async with EngineSession() as http:
        assert http.session is given


def test_processes_and_connections_are_those_that_were_given() -> None:
    given = Given()
    copy_context().run(asyncio.run, use(given))
    assert given.started == ["rank 0", "closed"]
    assert outside.get() is None
