"""A child process that answers calls over a socket pair. Launchers and the reward pool are built on it.

The parent uses `Child.start(spec)`, `await child.call(method, payload)` and `await child.stop()`. The child has an object with
`handle(method, payload) -> bytes`, which is called in the main thread, one call at a time.

The socket is also a lifeline: when the parent is gone, for whatever reason, the child's reader thread sees the end of the stream and ends
the process.

    Child._read      consumes frames from the child; produces results; waits for the socket; woken by the child or its death
    _Server._read    consumes frames from the parent; produces queued calls, and stack dumps at once; ends the process at end of stream
    _Server.run      consumes queued calls; produces replies
"""

import asyncio
import contextlib
import ctypes
import itertools
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from offbeat import errors
from offbeat.aio import deadline
from offbeat.loading import load_module
from offbeat.onlooker import LOOK_S, Onlooker, is_stopped, log_tail, system_view

_HEADER = struct.Struct("!QQB")  # payload bytes, call id, kind
_READY, _CALL, _RESULT, _FAILURE, _STACK, _STOP, _BEAT = range(7)
_STACK_TIMEOUT_S = 1.0
_PR_SET_PDEATHSIG = 1


class Handler(Protocol):
    """Interface of what a child serves. A handler with an attribute `lifeline` gets a `Lifeline` there before its first call."""

    def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one call; an exception is sent to the caller."""
        ...


class Lifeline(Protocol):
    """Lets a handler reach its parent from any thread while it answers a call."""

    def beat(self, work: str) -> None:
        """Report that the child is alive and what it is doing; the parent quotes the last report if it finds the child stuck."""
        ...

    def give_up(self, error: Exception) -> None:
        """Answer the current call, if there is one, with an error; a later result of the call itself is dropped."""
        ...


@dataclass(frozen=True)
class ChildSpec:
    """How to start one child.

    Attributes:
        name: the name shown to people, such as "rank 0".
        target: "module:Class" of the handler, constructed without arguments.
        env: environment variables added to the parent's; thread counts must be set here, before libraries load.
        without: names of the parent's variables that the child does not get.
        log: file that receives stdout and stderr; None shares the parent's.
    """

    name: str
    target: str
    env: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    without: frozenset[str] = frozenset()

    @property
    def environment(self) -> dict[str, str]:
        """The complete environment of the child."""
        return {name: value for name, value in os.environ.items() if name not in self.without} | dict(self.env)


@dataclass(frozen=True)
class Failure:
    """An exception in transit to the caller: the name of its class, its text, and its notes."""

    kind: str
    text: str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, exc: BaseException, *notes: str) -> "Failure":
        """Take the name, text and notes of an exception, with further notes."""
        return cls(type(exc).__name__, str(exc), (*getattr(exc, "__notes__", ()), *notes))

    def to_exception(self, name: str, doing: str) -> errors.OffbeatError:
        """Rebuild the exception: Offbeat's own errors as themselves, others as a `WorkerError` with the worker and what it was doing."""
        cls = getattr(errors, self.kind, None)
        if isinstance(cls, type) and issubclass(cls, errors.OffbeatError):
            exc = cls(self.text)
        else:
            exc = errors.WorkerError(f"{name} failed {doing}: {self.kind}: {self.text}")
        for note in self.notes:
            exc.add_note(note)
        return exc

    def pack(self) -> bytes:
        """Encode as length-prefixed UTF-8 strings."""
        parts = [part.encode() for part in (self.kind, self.text, *self.notes)]
        return b"".join(struct.pack("!Q", len(part)) + part for part in parts)

    @classmethod
    def unpack(cls, data: bytes) -> "Failure":
        """Decode what `pack` encoded."""
        parts, at = [], 0
        while at < len(data):
            (size,) = struct.unpack_from("!Q", data, at)
            parts.append(data[at + 8 : at + 8 + size].decode())
            at += 8 + size
        return cls(parts[0], parts[1], tuple(parts[2:]))


@runtime_checkable
class _Reaching(Protocol):
    """A handler that wants a lifeline to its parent."""

    lifeline: Lifeline | None


def resolve_handler(target: str) -> Handler:
    """Construct an instance of the class named "module:Class"."""
    module, _, name = target.partition(":")
    return getattr(load_module(module), name)()


def thread_stacks() -> str:
    """Return the Python stack of every thread of this process, main thread first."""
    names = {t.ident: t.name for t in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    return "\n".join(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)


class Child:
    """The parent's end of one child process.

    Attributes:
        name: the name shown to people.
        host: address on which the child's servers listen; children run on this machine.
    """

    host = "127.0.0.1"

    def __init__(
        self, spec: ChildSpec, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
    ) -> None:
        self.name = spec.name
        self._spec = spec
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[bytes | Failure]] = {}
        self._ready: asyncio.Future[bytes | Failure] = asyncio.get_running_loop().create_future()
        self._pending[0] = self._ready
        self._beat: tuple[float, str] | None = None
        self._onlooker = Onlooker(spec.name)
        self._looking: asyncio.Task[None] | None = None
        self._reading = asyncio.create_task(self._read(), name=f"read {spec.name}")

    @classmethod
    async def start(cls, spec: ChildSpec, *, timeout_s: float) -> "Child":
        """Start the process and wait until its handler has been constructed.

        Raises:
            DeathError: the process died first; shows the end of its log.
            DeadlineError: the process was not ready in time; shows its stack. It has been killed.
            WorkerError: the handler's constructor raised an error that is not one of Offbeat's own.
        """
        ours, theirs = socket.socketpair()
        log = spec.log.open("ab") if spec.log else None
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "offbeat.process", spec.target, spec.name, str(theirs.fileno()), str(os.getpid()),
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=spec.environment, start_new_session=True,
            )
        finally:
            theirs.close()
            if log:
                log.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        child = cls(spec, process, reader, writer)
        try:
            await child._answer(child._ready, "to start", timeout_s=timeout_s, what=f"{spec.name} to start")
        except BaseException:
            await child.kill()
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not been seen to end."""
        return not self._reading.done()

    async def call(self, method: str, payload: bytes = b"", *, timeout_s: float, patience_s: float | None = None) -> bytes:
        """Run `handler.handle(method, payload)` in the child.

        Args:
            patience_s: for how long the process may be stopped, in this call or before, or hang in a way that it cannot report itself;
                None for as long as `timeout_s`.

        Raises:
            WorkerError: the handler raised an error that is not one of Offbeat's own; names the child and the method.
            StuckError: the process was stopped, or hung, for longer than `patience_s`.
            DeathError: the process died; names it, the method and the signal or the exit code.
            DeadlineError: no answer came in time; shows the child's stacks. The call continues in the child.
        """
        if not self.alive:
            raise await self._death(f"before {method}")
        future = self._send(_CALL, method.encode() + b"\0" + payload)
        if patience_s is not None:
            self._onlooker.begin(method)
            self._looking = self._looking or asyncio.create_task(self._look_on(), name=f"look at {self.name}")
        return await self._answer(future, f"in {method}", timeout_s=timeout_s, what=f"{method} on {self.name}", patience_s=patience_s)

    async def call_each(self, method: str, payloads: Sequence[bytes], *, timeout_s: float) -> AsyncIterator[bytes]:
        """Send all calls at once and yield their answers in order.

        Args:
            timeout_s: limit for each answer, counted from the previous one.

        Raises:
            WorkerError, DeathError, DeadlineError: as in `call`; the calls behind the failed one continue in the child.
        """
        if not self.alive:
            raise await self._death(f"before {method}")
        for future in [self._send(_CALL, method.encode() + b"\0" + payload) for payload in payloads]:
            yield await self._answer(future, f"in {method}", timeout_s=timeout_s, what=f"{method} on {self.name}")

    async def stack(self) -> str:
        """Return the Python stacks of the child's threads, or what the operating system knows about a child that does not answer."""
        guess = ""
        if self.alive and not is_stopped(self.pid):
            with contextlib.suppress(TimeoutError, _GoneError):
                async with asyncio.timeout(_STACK_TIMEOUT_S):
                    stacks = await self._send(_STACK, b"")
                    assert isinstance(stacks, bytes), "a stack is no failure"
                    return f"stack of {self.name}:\n{stacks.decode()}"
            guess = "native code holds its interpreter lock; " if self.alive else ""
        return f"{self.name} (process {self.pid}) does not answer: {guess}{system_view(self.pid)}"

    async def ended(self) -> None:
        """Wait until the process is dead."""
        await asyncio.wait([self._reading])

    async def stop(self, *, timeout_s: float) -> None:
        """Ask the process to end after its current call; kill it if it does not, or at once if it is stopped."""
        with contextlib.suppress(ConnectionError):
            self._frame(_STOP, 0, b"")
        try:
            async with asyncio.timeout(0 if is_stopped(self.pid) else timeout_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            await self.kill()

    async def kill(self) -> None:
        """Kill the process and its whole process group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._writer.close()
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _answer(
        self, future: "asyncio.Future[bytes | Failure]", doing: str, *, timeout_s: float, what: str, patience_s: float | None = None,
    ) -> bytes:
        try:
            async with deadline(what, timeout_s):
                while patience_s is not None and not (await asyncio.wait([future], timeout=LOOK_S))[0]:
                    if stuck := self._onlooker.verdict(patience_s=patience_s):
                        raise stuck
                result = await future
        except _GoneError:
            raise await self._death(doing) from None
        except errors.StuckError:  # the message says all there is to say
            raise
        except errors.DeadlineError as exc:
            exc.add_note(await self.stack())
            raise
        if isinstance(result, Failure):
            raise result.to_exception(self.name, doing)
        return result

    def _send(self, kind: int, payload: bytes) -> "asyncio.Future[bytes | Failure]":
        call_id = next(self._ids)
        future = self._pending[call_id] = asyncio.get_running_loop().create_future()
        self._frame(kind, call_id, payload)
        return future

    def _frame(self, kind: int, call_id: int, payload: bytes) -> None:
        if self._writer.is_closing():  # the process is gone, and `_read` tells those who wait
            return
        self._writer.write(_HEADER.pack(len(payload), call_id, kind))
        self._writer.write(payload)

    async def _read(self) -> None:
        try:
            while True:
                size, call_id, kind = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                payload = await self._reader.readexactly(size)
                if kind == _BEAT:
                    self._beat = time.monotonic(), payload.decode()
                    continue
                future = self._pending.pop(call_id)
                if not future.done():  # otherwise its caller has given up
                    future.set_result(Failure.unpack(payload) if kind == _FAILURE else payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._process.wait()
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(_GoneError())
                    future.exception()  # there may be no waiter any more

    async def _look_on(self) -> None:
        while self.alive:
            self._onlooker.look(self.pid, beat=self._beat)
            await asyncio.sleep(LOOK_S)

    async def _death(self, doing: str) -> errors.DeathError:
        code = await self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        error = errors.DeathError(f"{self.name} (process {self._process.pid}) {how} {doing}")
        if tail := log_tail(self._spec.log):
            error.add_note(f"last lines of {self._spec.log}:\n{tail}")
        return error


class _GoneError(Exception):
    """The process ended before it answered."""


class _Server:
    """The child's end of the socket pair."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self._name = name
        self._connection = connection
        self._calls: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._writing = threading.Lock()
        self._answering = threading.Lock()
        self._call_id = 0

    def run(self, target: str) -> None:
        threading.Thread(target=self._read, name="lifeline", daemon=True).start()
        try:
            handler = resolve_handler(target)
        except Exception as exc:
            self._reply(0, self._failure(exc))
            raise
        if isinstance(handler, _Reaching):
            handler.lifeline = self
        self._frame(_READY, 0, b"")
        while (call := self._calls.get()) is not None:
            call_id, payload = call
            self._call_id = call_id
            method, _, argument = payload.partition(b"\0")
            try:
                result = handler.handle(method.decode(), argument)
            except Exception as exc:
                result = self._failure(exc)
            self._end_call(result)

    def beat(self, work: str) -> None:
        """See `Lifeline.beat`."""
        self._frame(_BEAT, 0, work.encode())

    def give_up(self, error: Exception) -> None:
        """See `Lifeline.give_up`."""
        self._end_call(self._failure(error))

    def _end_call(self, result: bytes | Failure) -> None:
        """Answer the current call unless it has already been answered."""
        with self._answering:
            call_id, self._call_id = self._call_id, 0
        if call_id:
            self._reply(call_id, result)

    def _failure(self, exc: Exception) -> Failure:
        if isinstance(exc, errors.SyncError):
            return Failure.of(exc)  # the message says where every rank is, including this one
        return Failure.of(exc, f"traceback in {self._name}:\n{traceback.format_exc()}")

    def _read(self) -> None:
        stream = self._connection.makefile("rb")
        while True:
            header = stream.read(_HEADER.size)
            if len(header) < _HEADER.size:
                os._exit(0)  # the parent is gone, and no clean-up may delay the exit
            size, call_id, kind = _HEADER.unpack(header)
            payload = stream.read(size)
            if kind == _STACK:
                self._frame(_RESULT, call_id, thread_stacks().encode())
            else:
                self._calls.put(None if kind == _STOP else (call_id, payload))

    def _reply(self, call_id: int, result: bytes | Failure) -> None:
        if isinstance(result, Failure):
            self._frame(_FAILURE, call_id, result.pack())
        else:
            self._frame(_RESULT, call_id, result)

    def _frame(self, kind: int, call_id: int, payload: bytes) -> None:
        with self._writing:
            self._connection.sendall(_HEADER.pack(len(payload), call_id, kind))
            self._connection.sendall(payload)


def die_with_parent(parent: int) -> None:
    """Arrange on Linux that the kernel kills this process when the parent dies, even while native code holds the interpreter lock.

    Other systems rely on the lifeline.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    """Entry point of the child: `python -m offbeat.process TARGET NAME FD PARENT`."""
    target, name, fd, parent = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Server(name, socket.socket(fileno=int(fd))).run(target)


if __name__ == "__main__":
    main()
