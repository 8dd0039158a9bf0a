"""What a process takes from outside itself: other processes, and connections to engines. Real unless something else is given.

`Child.start` and `EngineSession` ask here. Tests of whole runs in virtual time (`tests/worlds`) give stand-ins, and all that lies between,
from the composition of a run to its launcher, its clients of engines and its pools of user code, runs unmodified.
"""

from contextvars import ContextVar
from typing import Any, Protocol


class Outside(Protocol):
    """Given in place of the operating system and the network."""

    async def start_child(self, spec: Any, *, timeout_s: float) -> Any:
        """Start what stands in for the process of a `ChildSpec`; see `offbeat.process.child.Child.start`."""
        ...

    def open_session(self) -> Any:
        """Open what stands in for an `aiohttp.ClientSession`."""
        ...


outside: ContextVar[Outside | None] = ContextVar("outside", default=None)
"""What was given; None where all is real. Set before a run begins, as tasks inherit it."""
