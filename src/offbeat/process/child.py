"""A child process that answers calls over a socket pair, seen from the parent. Launchers and the pools of user code are built on it.

The parent uses `Child.start(spec)`, `await child.call(method, payload)` and `await child.stop()`. The child's half is in `serving`.

    Child._read      consumes frames from the child; produces results; waits for the socket; woken by the child or its death
    Child._send_on   consumes frames behind one that is large; waits for the child to read; woken by the socket
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offbeat import errors
from offbeat.aio import deadline
from offbeat.child_watch import LOOK_S, ChildWatch, bound_log, cpu_seconds, is_stopped, log_tail, system_view
from offbeat.outside import outside
from offbeat.process.frames import BEAT, CALL, CANCEL, FAILURE, HEADER, STACK, STOP, CallFailure, Payload

_STACK_TIMEOUT_S = 1.0
_MOST_BYTES = 1 << 40
"""Size of a frame beyond which it is not a frame, but bytes that something else wrote to the socket."""
_EXIT_S = 5.0
"""Time for a process to exit when its end of the socket is closed."""
_AT_ONCE_BYTES = 1 << 20
"""Most bytes handed to the socket's writer at once, because it copies the ones that the socket does not take."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChildSpec:
    """One child to start.

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


class Child:
    """The parent's end of one child process, on this machine: it sees this process's files, so it has no `disk`."""

    host = "127.0.0.1"
    disk = None

    def __init__(
        self, spec: ChildSpec, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
    ) -> None:
        self.name = spec.name
        self._spec = spec
        self._process = process
        self._reader = reader
        self._log_looked_s = time.monotonic()
        self._writer = writer
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[bytes | CallFailure]] = {}
        self._ready: asyncio.Future[bytes | CallFailure] = asyncio.get_running_loop().create_future()
        self._pending[0] = self._ready
        self._beat: tuple[float, str] | None = None
        self._watch = ChildWatch(spec.name)
        self._looking: asyncio.Task[None] | None = None
        self._unsent: deque[bytes | memoryview] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._reading = asyncio.create_task(self._read(), name=f"read {spec.name}")

    @classmethod
    async def start(cls, spec: ChildSpec, *, timeout_s: float) -> "Child":
        """Start the process and wait until its handler has been constructed.

        Raises:
            DeathError: the process died first; shows the end of its log.
            DeadlineError: the process was not ready in time; shows its stack. It has been killed.
            WorkerError: the handler's constructor raised an error that is not an `OffbeatError`.
        """
        if (given := outside.get()) is not None:
            return await given.start_child(spec, timeout_s=timeout_s)
        ours, theirs = socket.socketpair()
        log = spec.log.open("ab") if spec.log else None
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "offbeat.process", spec.target, spec.name, str(theirs.fileno()), str(os.getpid()),
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=spec.environment, start_new_session=True,
            )
        finally:
            theirs.close()
            if log:
                log.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        child = cls(spec, process, reader, writer)
        try:
            await child._wait_for(child._ready, "to start", timeout_s=timeout_s, what=f"{spec.name} to start")
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

    @property
    def cpu_s(self) -> float:
        """CPU time of the process and of its descendants so far, in seconds."""
        return cpu_seconds(self.pid)

    async def call(self, method: str, payload: Payload = b"", *, timeout_s: float, patience_s: float | None = None) -> bytes:
        """Run `handler.handle(method, payload)` in the child.

        Args:
            payload: bytes, or pieces that make them up, whose memory must not change until the call is answered.
            patience_s: longest time for which the process may be stopped, in this call or before, or hang so that it cannot report it;
                None for as long as `timeout_s`.

        Raises:
            WorkerError: the handler raised an error that is not an `OffbeatError`; names the child and the method.
            StuckError: the process was stopped, or hung, for longer than `patience_s`.
            DeathError: the process died; names it, the method and the signal or the exit code.
            DeadlineError: no answer came in time; shows the child's stacks.

        After a deadline, or if this coroutine is cancelled, a handler that is a coroutine is cancelled; another goes on with the call.
        """
        if not self.alive:
            raise await self._death(f"before {method}")
        pieces = (payload,) if isinstance(payload, bytes) else payload
        call_id, future = self._send(CALL, method.encode() + b"\0", *pieces)
        if patience_s is not None:
            self._watch.begin_call(method)
            self._looking = self._looking or asyncio.create_task(self._look_on(), name=f"look at {self.name}")
        try:
            return await self._wait_for(future, f"in {method}", timeout_s=timeout_s, what=f"{method} on {self.name}", patience_s=patience_s)
        except (asyncio.CancelledError, errors.DeadlineError):
            self._frame(CANCEL, call_id, b"")
            raise

    async def call_each(self, method: str, payloads: Sequence[bytes], *, timeout_s: float) -> AsyncIterator[bytes]:
        """Send all calls at once and yield their answers in order.

        `timeout_s` is for each answer, counted from the previous one.

        Raises:
            WorkerError, DeathError, DeadlineError: as in `call`; the calls behind the failed one continue in the child.
        """
        if not self.alive:
            raise await self._death(f"before {method}")
        for _, future in [self._send(CALL, method.encode() + b"\0" + payload) for payload in payloads]:
            yield await self._wait_for(future, f"in {method}", timeout_s=timeout_s, what=f"{method} on {self.name}")

    async def stack(self) -> str:
        """Return the Python stacks of the child's threads, or the operating system's view of a child that does not answer."""
        guess = ""
        if self.alive and not is_stopped(self.pid):
            with contextlib.suppress(TimeoutError, _GoneError):
                async with asyncio.timeout(_STACK_TIMEOUT_S):
                    _, stacks_come = self._send(STACK, b"")
                    stacks = await stacks_come
                    assert isinstance(stacks, bytes), "a stack is no failure"
                    return f"stack of {self.name}:\n{stacks.decode()}"
            if self.alive:
                guess = "it is still starting; " if self._ready.cancelled() else "native code holds its interpreter lock; "
        return f"{self.name} (process {self.pid}) does not answer: {guess}{system_view(self.pid)}"

    async def ended(self) -> None:
        """Wait until the process is dead."""
        await asyncio.wait([self._reading])

    async def stop(self, *, timeout_s: float) -> None:
        """Ask the process to end after its current call; kill it if it does not, or at once if it is stopped."""
        with contextlib.suppress(ConnectionError):
            self._frame(STOP, 0, b"")
        try:
            async with asyncio.timeout(0 if is_stopped(self.pid) else timeout_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            await self.kill()

    async def kill(self) -> None:
        """Kill the process and its whole process group at once."""
        await self._kill_group()
        self._writer.close()
        for task in filter(None, (self._looking, self._sending)):
            task.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _wait_for(
        self, future: "asyncio.Future[bytes | CallFailure]", doing: str, *, timeout_s: float, what: str, patience_s: float | None = None,
    ) -> bytes:
        try:
            async with deadline(what, timeout_s):
                while patience_s is not None and not (await asyncio.wait([future], timeout=LOOK_S))[0]:
                    if stuck := self._watch.verdict(patience_s=patience_s):
                        raise stuck
                result = await future
        except _GoneError:
            raise await self._death(doing) from None
        except errors.StuckError:  # the message says all there is to say
            raise
        except errors.DeadlineError as exc:
            exc.add_note(await self.stack())
            raise
        if isinstance(result, CallFailure):
            raise result.to_exception(self.name, doing)
        return result

    def _send(self, kind: int, *payload: bytes | memoryview) -> "tuple[int, asyncio.Future[bytes | CallFailure]]":
        call_id = next(self._ids)
        future = self._pending[call_id] = asyncio.get_running_loop().create_future()
        self._frame(kind, call_id, *payload)
        return call_id, future

    def _frame(self, kind: int, call_id: int, *payload: bytes | memoryview) -> None:
        if self._writer.is_closing():  # the process is gone, and `_read` ends the waiting calls
            return
        num_bytes = sum(map(len, payload))
        frame = (HEADER.pack(num_bytes, call_id, kind), *payload)
        if num_bytes <= _AT_ONCE_BYTES and not self._unsent:
            self._writer.writelines(frame)
            return
        self._unsent.extend(frame)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_on(), name=f"send to {self.name}")

    async def _send_on(self) -> None:
        with contextlib.suppress(ConnectionError):  # `_read` ends the waiting calls
            while self._unsent:
                piece = self._unsent[0]  # until all of it is sent, so that no other frame comes between
                for start in range(0, len(piece), _AT_ONCE_BYTES):
                    self._writer.write(piece[start : start + _AT_ONCE_BYTES])
                    await self._writer.drain()
                self._unsent.popleft()
        self._unsent.clear()

    async def _read(self) -> None:
        try:
            while True:
                size, call_id, kind = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if size > _MOST_BYTES:
                    raise ValueError(f"a frame of {size} bytes")
                payload = await self._reader.readexactly(size)
                if kind == BEAT:
                    self._beat = time.monotonic(), payload.decode()
                    continue
                future = self._pending.pop(call_id, None)
                if future is None:
                    _log.warning("%s has answered a call twice; its second answer is dropped", self.name)
                elif not future.done():  # otherwise its caller has given up
                    future.set_result(CallFailure.unpack(payload) if kind == FAILURE else payload)
                self._bound_log()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception:  # of whatever kind: the calls that wait must end below
            _log.exception("%s has sent what is no answer, and is killed", self.name)
        await self._end_without_wire()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(_GoneError())
                future.exception()  # there may be no waiter any more

    def _bound_log(self) -> None:
        """Drop the oldest lines of a long log; looks once a second at most."""
        if self._spec.log is not None and time.monotonic() - self._log_looked_s >= 1.0:
            self._log_looked_s = time.monotonic()
            bound_log(self._spec.log)

    async def _end_without_wire(self) -> None:
        """Wait for the end of a process that cannot be talked to any more, and kill it if it lives on."""
        try:
            async with asyncio.timeout(_EXIT_S):
                await self._process.wait()
        except TimeoutError:
            await self._kill_group()

    async def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # Process.kill would take the exit status away from other waiters
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _look_on(self) -> None:
        while self.alive:
            self._watch.look(self.pid, beat=self._beat)
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
