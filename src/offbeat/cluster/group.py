"""Workers behind one interface, whoever launched them: `Launcher.start(spec)` gives a `Worker`, and `ask` calls it with types.

What crosses is a frozen dataclass each way, encoded by `data.wire`. A `Service` is the other end: its public methods take one
such argument.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

from offbeat.data import wire

T = TypeVar("T")


@dataclass(frozen=True)
class Nothing:
    """The argument or answer of a call that has none."""


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to start.

    Attributes:
        name: how people know it, such as "rank 0" or "engine 1".
        target: "module:Class" of its `Service`.
        log: file for its output; None shares the terminal.
        threads: CPU threads of its numeric libraries; also what it asks of a scheduler.
        num_devices: accelerators it needs.
        env: further environment variables.
    """

    name: str
    target: str
    log: Path | None
    threads: int = 1
    num_devices: int = 0
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that must be set before numeric libraries load: OpenMP threads that spin starve every neighbour."""
        threads = str(self.threads)
        none = {} if self.num_devices else {"CUDA_VISIBLE_DEVICES": ""}  # else every process would take the first one it finds
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive", **none, **self.env}


class Worker(Protocol):
    """One live worker."""

    @property
    def name(self) -> str: ...

    @property
    def host(self) -> str:
        """Address on which its servers listen for the other processes of the run."""
        ...

    @property
    def alive(self) -> bool: ...

    async def call(self, method: str, payload: bytes = b"", *, timeout_s: float) -> bytes:
        """See `offbeat.process.Child.call`."""
        ...

    async def stop(self, *, timeout_s: float) -> None:
        """End it, gently at first."""
        ...


class Launcher(Protocol):
    """Starts workers somewhere. Used as `async with`; leaving it ends what it started."""

    async def __aenter__(self) -> "Launcher": ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def start(self, spec: WorkerSpec, *, timeout_s: float) -> Worker:
        """Start a worker and wait until its service is constructed.

        Raises:
            WorkerError: it failed or died; shows the first real error.
            DeadlineError: it was not ready in time; it has been ended.
        """
        ...


async def ask(worker: Worker, method: str, request: Any, reply: type[T], *, timeout_s: float) -> T:
    """Call `method` with a frozen dataclass and decode its answer as `reply`."""
    return wire.decode(reply, await worker.call(method, wire.encode(request), timeout_s=timeout_s))


class Service:
    """The worker's end: each public method takes one frozen dataclass and returns one. Types are read from its annotations."""

    def handle(self, method: str, payload: bytes) -> bytes:
        """Decode, call, encode."""
        function = getattr(self, method, None)
        if method.startswith("_") or method == "handle" or not inspect.ismethod(function):
            raise LookupError(f"{type(self).__name__} has no method {method!r}")
        argument = next(name for name in inspect.signature(function).parameters)
        request = wire.decode(get_type_hints(function)[argument], payload)
        return wire.encode(function(request))
