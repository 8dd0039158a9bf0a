"""A child process that answers calls over a socket pair. Launchers and the reward pool stand on it.

Parent: `Child.start(spec)`, `await child.call(method, payload)`, `await child.stop()`. Child: an object with
`handle(method, payload) -> bytes`, called in the main thread, one call at a time.

The socket is also a lifeline: when the parent is gone, however it went, the reader thread sees the end of the stream and ends the process.

    Child._read      consumes frames from the child; produces results; waits for the socket; woken by the child or its death
    _Server._read    consumes frames from the parent; produces queued calls, and stack dumps at once; ends the process at end of stream
    _Server.run      consumes queued calls; produces replies
"""

import asyncio
import contextlib
import ctypes
import importlib
import itertools
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from offbeat import errors
from offbeat.aio import deadline

_HEADER = struct.Struct("!QQB")  # payload bytes, call id, kind
_READY, _CALL, _RESULT, _FAILURE, _STACK, _STOP = range(6)
_STACK_TIMEOUT_S = 2.0
_LOG_TAIL_LINES = 12
_PR_SET_PDEATHSIG = 1


class Handler(Protocol):
    """What a child serves."""

    def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one call; an exception is sent to the caller."""
        ...


@dataclass(frozen=True)
class ChildSpec:
    """How to start one child.

    Attributes:
        name: how people know it, such as "rank 0".
        target: "module:Class" of its handler, constructed without arguments.
        env: environment variables added to the parent's; thread counts must be set here, before libraries load.
        log: file that takes its stdout and stderr; None shares the parent's.
    """

    name: str
    target: str
    env: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the caller: the name of its class, its text and its traceback."""

    kind: str
    text: str
    trace: str

    def to_exception(self, name: str) -> errors.OffbeatError:
        """Our own errors come back as themselves; anything else as a `WorkerError` that names the worker."""
        cls = getattr(errors, self.kind, None)
        if isinstance(cls, type) and issubclass(cls, errors.OffbeatError):
            exc = cls(self.text)
        else:
            exc = errors.WorkerError(f"{name} failed: {self.kind}: {self.text}")
        exc.add_note(f"traceback in {name}:\n{self.trace}")
        return exc

    def pack(self) -> bytes:
        parts = [part.encode() for part in (self.kind, self.text, self.trace)]
        return b"".join(struct.pack("!Q", len(part)) + part for part in parts)

    @classmethod
    def unpack(cls, data: bytes) -> "Failure":
        parts, at = [], 0
        while at < len(data):
            (size,) = struct.unpack_from("!Q", data, at)
            parts.append(data[at + 8 : at + 8 + size].decode())
            at += 8 + size
        return cls(*parts)


def resolve_handler(target: str) -> Handler:
    """Construct the class named "module:Class"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)()


def answer(handler: Handler, method: str, payload: bytes) -> bytes | Failure:
    """One call, with any exception turned into data."""
    try:
        return handler.handle(method, payload)
    except Exception as exc:
        return Failure(type(exc).__name__, str(exc), traceback.format_exc())


def thread_stacks() -> str:
    """The Python stack of every thread of this process, main thread first."""
    names = {t.ident: t.name for t in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    return "\n".join(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)


class Child:
    """The parent's end of one child process.

    Attributes:
        name: how people know it.
        host: address on which its servers listen; children live on this machine.
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
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._ready: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[0] = self._ready
        self._reading = asyncio.create_task(self._read(), name=f"read {spec.name}")

    @classmethod
    async def start(cls, spec: ChildSpec, *, timeout_s: float) -> "Child":
        """Start the process and wait until its handler is constructed.

        Raises:
            WorkerError: it died first; shows the end of its log.
            DeadlineError: it was not ready in time; it has been killed.
        """
        ours, theirs = socket.socketpair()
        log = spec.log.open("ab") if spec.log else None
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "offbeat.process", spec.target, str(theirs.fileno()), str(os.getpid()),
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | dict(spec.env), start_new_session=True,
            )
        finally:
            theirs.close()
            if log:
                log.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        child = cls(spec, process, reader, writer)
        try:
            async with deadline(f"{spec.name} to start", timeout_s):
                await child._ready
        except BaseException:
            await child.kill()
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._reading.done()

    async def call(self, method: str, payload: bytes = b"", *, timeout_s: float) -> bytes:
        """Run `handler.handle(method, payload)` in the child.

        Raises:
            WorkerError: the handler raised something that is not ours, or the process died; both name it.
            DeadlineError: no answer in time; shows where the child's main thread is. The call goes on in the child.
        """
        if not self.alive:
            raise await self._death()
        try:
            async with deadline(f"{method} on {self.name}", timeout_s):
                return await self._send(_CALL, method.encode() + b"\0" + payload)
        except errors.DeadlineError as exc:
            exc.add_note(await self.stack())
            raise

    async def stack(self) -> str:
        """Python stacks of the child, or a line that says it does not answer."""
        try:
            async with asyncio.timeout(_STACK_TIMEOUT_S):
                return f"stack of {self.name}:\n{(await self._send(_STACK, b'')).decode()}"
        except (TimeoutError, errors.WorkerError):
            return f"{self.name} does not answer: stopped, dead, or holding the interpreter lock"

    async def stop(self, *, timeout_s: float) -> None:
        """Ask it to end after the call it is in; kill it when it does not."""
        with contextlib.suppress(errors.WorkerError, ConnectionError):
            self._frame(_STOP, 0, b"")
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End it at once, and its whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._writer.close()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _send(self, kind: int, payload: bytes) -> bytes:
        call_id = next(self._ids)
        future = self._pending[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._frame(kind, call_id, payload)
            return await future
        finally:
            self._pending.pop(call_id, None)

    def _frame(self, kind: int, call_id: int, payload: bytes) -> None:
        self._writer.write(_HEADER.pack(len(payload), call_id, kind))
        self._writer.write(payload)

    async def _read(self) -> None:
        try:
            while True:
                size, call_id, kind = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                payload = await self._reader.readexactly(size)
                future = self._pending.get(call_id)
                if future is None or future.done():
                    continue
                if kind == _FAILURE:
                    future.set_exception(Failure.unpack(payload).to_exception(self.name))
                else:
                    future.set_result(payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            death = await self._death()
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(death)
                    future.exception()  # may have no waiter any more

    async def _death(self) -> errors.WorkerError:
        code = await self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        error = errors.WorkerError(f"{self.name} (process {self._process.pid}) {how}")
        if tail := log_tail(self._spec.log):
            error.add_note(f"last lines of {self._spec.log}:\n{tail}")
        return error


def log_tail(log: Path | None) -> str:
    """The last lines of a log, or an empty string."""
    if log is None or not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])


def redirect_output(log: str) -> None:
    """Append this process's stdout and stderr to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class _Server:
    """The child's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._calls: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._writing = threading.Lock()

    def run(self, target: str) -> None:
        threading.Thread(target=self._read, name="lifeline", daemon=True).start()
        try:
            handler = resolve_handler(target)
        except Exception as exc:
            self._reply(0, Failure(type(exc).__name__, str(exc), traceback.format_exc()))
            raise
        self._frame(_READY, 0, b"")
        while (call := self._calls.get()) is not None:
            call_id, payload = call
            method, _, argument = payload.partition(b"\0")
            self._reply(call_id, answer(handler, method.decode(), argument))

    def _read(self) -> None:
        stream = self._connection.makefile("rb")
        while True:
            header = stream.read(_HEADER.size)
            if len(header) < _HEADER.size:
                os._exit(0)  # the parent is gone: no clean-up may delay the end
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
    """Linux: be killed when the parent dies, even while native code holds the interpreter lock. Elsewhere the lifeline has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    """Entry point of the child: `python -m offbeat.process TARGET FD PARENT`."""
    target, fd, parent = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Server(socket.socket(fileno=int(fd))).run(target)


if __name__ == "__main__":
    main()
