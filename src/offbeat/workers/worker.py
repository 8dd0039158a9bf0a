"""Workers behind one interface, for any launcher: `Launcher.start(spec)` gives a `Worker`, and `ask` calls it with types.

`ask_all` calls several at once that depend on each other, and finds the root cause when they fail.

Requests and answers are frozen dataclasses, encoded by `data.wire`. A `WorkerService` is the other end: its methods take one request each.
"""

import asyncio
import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

from offbeat.config.for_processes import LauncherConfig
from offbeat.data import wire
from offbeat.errors import PeerError, first_line
from offbeat.machine import PROMISED_DEVICES, VISIBLE_DEVICES
from offbeat.phase import waiting_for
from offbeat.process.frames import Payload
from offbeat.workers.cause import Cause, cause_of, consequences, root_cause

T = TypeVar("T")
# By name, because importing Ray costs a second, and Ray is an optional extra.
_LAUNCHERS = {"local": ("offbeat.workers.local", "LocalLauncher"), "ray": ("offbeat.workers.ray", "RayLauncher")}
FAILED_STOP_S = 0.5
"""Time for a worker to end by itself after a failure. Workers that were told of the failure have reported theirs already."""

_DOING = {
    "join": "train ranks meet", "load_model": "train ranks load the model", "train_step": "train step",
    "write_weights": "writing the weights", "score": "scoring", "save": "saving", "load": "loading the checkpoint",
    "export": "exporting the model"}
"""Calls as they are shown while they are waited for; others are shown by their names."""

_GRACE_S = 0.3
_CAUSE_GRACE_S = 2.0
"""Time to wait for the others' errors after the first, and once more where the first ones are mere consequences."""


@dataclass(frozen=True)
class Nothing:
    """The argument or answer of a call that has none."""


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to start.

    Attributes:
        name: name shown to people, such as "rank 0" or "engine 1".
        target: "module:Class" of its `WorkerService`, such as "offbeat.trainer.worker:TrainWorker".
        log: file for its output; None shares the terminal.
        threads: CPU threads of its numeric libraries; also the number of cores that it requests of a scheduler.
    """

    name: str
    target: str
    log: Path | None
    threads: int = 1
    num_devices: int = 0
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.threads > 0, f"threads are chosen before a worker is started, got {self.threads} for {self.name}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that must be set before numeric libraries load."""
        none = {} if self.num_devices else {VISIBLE_DEVICES: ""}  # else every process would take the first one it finds
        return {**library_environment(self.threads), PROMISED_DEVICES: str(self.num_devices), **none, **self.env}


def library_environment(threads: int) -> dict[str, str]:
    """Return the variables that numeric libraries read when they load: number of threads, which must not spin, and level of logging.

    Freed memory stays with the process, up to its own peak: activations come and go at every layer, and glibc would give the large ones
    back each time, so that a tenth of the time went into mapping them again. All threads share that memory: otherwise each would keep what
    it has freed for itself, and an engine, whose versions are read, packed and hashed on several threads, several models' worth.
    """
    count = str(threads)
    return {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "OMP_WAIT_POLICY": "passive",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # a peer that is gone is told by a verdict, not by pages of native stack
    }


def huge_page_environment() -> dict[str, str]:
    """Return the variable that has glibc ask for huge pages, beside what the user's own has it do; other C libraries ignore it.

    A decode step reads all weights, and pages of 4 KiB are so many that their addresses are looked up in memory, too. Where the system
    gives huge pages to nobody, nothing changes. The first use of a huge page may take longer, so this is for engines that hold much.
    """
    given = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb=" in given:
        return {}
    return {"GLIBC_TUNABLES": f"{given}:glibc.malloc.hugetlb=1".lstrip(":")}


class Far(Protocol):
    """A disk that this process does not see, to which `workers.disks` copies files of the run, and back; disks of one `name` are one."""

    @property
    def name(self) -> str: ...

    async def ask(self, method: str, request: Any, reply: type[T], *, timeout_s: float) -> T:
        """Call a method of the `DiskService` there."""
        ...

    def path(self, place: str) -> str: ...


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

    @property
    def cpu_s(self) -> float | None:
        """CPU time of its process and of the processes below it so far, in seconds; None if that is not seen from here."""
        ...

    @property
    def disk(self) -> "Far | None":
        """Disk of its machine, if it does not see the folder of its log as this process does; its log is then copied every second."""
        ...

    async def call(self, method: str, payload: Payload = b"", *, timeout_s: float, patience_s: float | None = None) -> bytes:
        """See `offbeat.process.child.Child.call`."""
        ...

    async def stack(self) -> str:
        """Return the stacks of its threads, or the system's view of its process if it does not answer."""
        ...

    async def stop(self, *, timeout_s: float) -> None:
        """End it, gently at first."""
        ...


class Launcher(Protocol):
    """Starts workers somewhere. Used as `async with`; leaving it ends its workers, gently, or after an error within a moment."""

    async def __aenter__(self) -> "Launcher": ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def reserve(self, specs: Sequence[WorkerSpec], *, timeout_s: float) -> None:
        """Find room for these workers, for all or for none, and keep it for them until this launcher is left, even if they end.

        They are placed close together. Workers that were not announced are placed one by one when they start.

        Raises:
            DeadlineError: there was not enough room in time; names the resources asked for, and the ones there.
        """
        ...

    async def start(self, spec: WorkerSpec, *, timeout_s: float) -> Worker:
        """Start a worker and wait until its service is constructed.

        Raises:
            WorkerError, DeathError: it failed or died; shows the first real error.
            DeadlineError: it was not ready in time; it has been ended.
        """
        ...


def make_launcher(config: LauncherConfig, *, devices_taken: int = 0) -> Launcher:
    """Create the launcher that [cluster] names; the first `devices_taken` accelerators belong to other processes."""
    module, name = _LAUNCHERS[config.cluster.launcher]
    return getattr(importlib.import_module(module), name).from_config(config, devices_taken=devices_taken)


async def ask(worker: Worker, method: str, request: Any, reply: type[T], *, timeout_s: float, patience_s: float | None = None) -> T:
    """Call `method` with a frozen dataclass and decode its answer as `reply`."""
    return wire.decode(reply, await worker.call(method, wire.encode_pieces(request), timeout_s=timeout_s, patience_s=patience_s))


async def ask_all(
    workers: Sequence[Worker], method: str, requests: Sequence[Any], reply: type[T], *, timeout_s: float, patience_s: float | None = None,
) -> list[T]:
    """`ask` each worker its request, all at once.

    `patience_s` is the longest time for which a worker may be stopped, or hang.

    Raises:
        OffbeatError: the root cause where some fail, as raised by its worker; the others' errors are notes of one line. Where only a
            missed deadline is known, notes show every worker's stacks.
    """
    tasks = {
        worker.name: asyncio.create_task(ask(worker, method, request, reply, timeout_s=timeout_s, patience_s=patience_s))
        for worker, request in zip(workers, requests, strict=True)}
    failures: dict[str, Exception] = {}  # in the order in which they come
    for name, task in tasks.items():
        task.add_done_callback(lambda task, name=name: _note_failure(failures, name, task))
    try:
        with waiting_for(_DOING.get(method, method.replace("_", " ")), tasks) as done:
            for name, task in tasks.items():
                task.add_done_callback(lambda _task, name=name: done(name))
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        if not failures:
            return [task.result() for task in tasks.values()]
        await asyncio.wait(tasks.values(), timeout=_GRACE_S)
        if all(cause_of(error).is_consequence for error in failures.values()):
            await asyncio.wait(tasks.values(), timeout=_CAUSE_GRACE_S)
        unanswered = [worker for worker in workers if not tasks[worker.name].done()]
        raise await _explained(failures, method, unanswered)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


def _note_failure(failures: dict[str, Exception], name: str, task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and isinstance(error := task.exception(), Exception):
        failures[name] = error


async def _explained(failures: Mapping[str, Exception], method: str, unanswered: Sequence[Worker]) -> Exception:
    """Return the root cause, with the errors and stacks of the others as notes."""
    root = root_cause(failures)
    error, cause = failures[root], cause_of(failures[root])
    notes = []
    if cause is Cause.LOST_PEER and not isinstance(error, PeerError) and unanswered:
        # It is only known that a collective broke; the ranks that have left it are its victims.
        names = " and ".join(worker.name for worker in unanswered)
        error = PeerError(f"{names} made no progress in {method}, so that a collective of the others broke ({first_line(error)})")
        notes = await asyncio.gather(*(worker.stack() for worker in unanswered))
    if cause is Cause.LATE:
        notes = [note for name, other in failures.items() if name != root for note in getattr(other, "__notes__", ())]
        notes += await asyncio.gather(*(worker.stack() for worker in unanswered))
    if cause is Cause.RAISED and root not in str(error):
        notes.append(f"{root} raised it in {method}")
    notes += consequences(failures, root=root)
    notes += [f"{worker.name}: had not answered {method}" for worker in unanswered]
    for note in notes:
        error.add_note(note)
    return error


class WorkerService:
    """The worker's end: each public method takes a frozen dataclass or None, and returns one; its annotations give the types."""

    def handle(self, method: str, payload: bytes) -> bytes:
        """Decode, call, encode."""
        return answer(self, method, payload)


def answer(service: object, method: str, payload: bytes) -> bytes:
    """Call a public method of `service` with an encoded request; returns its encoded answer. Raises LookupError without the method."""
    function = getattr(service, method, None)
    if method.startswith("_") or method == "handle" or not inspect.ismethod(function):
        raise LookupError(f"{type(service).__name__} has no method {method!r}")
    argument = next(name for name in inspect.signature(function).parameters)
    request = wire.decode(get_type_hints(function)[argument], payload)
    return wire.encode(function(request))
