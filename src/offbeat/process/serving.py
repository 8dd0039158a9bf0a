"""The child's half of a child process: it constructs the handler, calls it, and answers. `python -m offbeat.process` runs it.

A handler with a plain `handle` is called in the main thread, one call at a time. If its `handle` is a coroutine function, the main thread
runs an event loop: calls run concurrently and are answered in any order, and one that the parent no longer waits for is cancelled.

The socket is also a lifeline: when the parent is gone, for any reason, the reader thread sees the end of the stream and ends the process.
Ctrl-C and SIGTERM do not end it: the parent decides.

    _Server._read    consumes frames from the parent; produces queued frames, and stack dumps at once; ends the process at end of stream
    _Server._work    consumes queued frames; produces replies, one after another
    _Server._serve   the same for coroutines, many at a time; woken by `_read`
"""

import asyncio
import ctypes
import inspect
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Protocol, runtime_checkable

from offbeat import errors
from offbeat.loading import load_module
from offbeat.process.frames import BEAT, CALL, CANCEL, FAILURE, HEADER, READY, RESULT, STACK, STOP, CallFailure

_PR_SET_PDEATHSIG = 1


class Lifeline(Protocol):
    """Lets a handler reach its parent from any thread while it answers a call."""

    def beat(self, text: str) -> None:
        """Report that the child is alive and does the work `text`; the parent quotes the last report if it finds the child stuck."""
        ...

    def give_up(self, error: Exception) -> None:
        """Answer the current call, if there is one, with an error; a later result of the call itself is dropped. Not for coroutines."""
        ...


class Handler(Protocol):
    """Object that a child serves. A handler with an attribute `lifeline` gets a `Lifeline` there before its first call."""

    def handle(self, method: str, payload: bytes) -> bytes | Coroutine[None, None, bytes]:
        """Answer one call; an exception is sent to the caller. May be a coroutine function."""
        ...


@runtime_checkable
class _Reaching(Protocol):
    """A handler that wants a lifeline to its parent."""

    lifeline: Lifeline | None


def thread_stacks() -> str:
    """Return the Python stack of every thread of this process, main thread first."""
    names = {t.ident: t.name for t in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    return "\n".join(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)


class _Server:
    """The child's end of the socket pair, and its `Lifeline`."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self._name = name
        self._connection = connection
        self._pid = os.getpid()
        self._frames: queue.SimpleQueue[tuple[int, int, bytes]] = queue.SimpleQueue()
        self._wake: Callable[[], object] = lambda: None
        self._writing = threading.Lock()
        self._answering = threading.Lock()
        self._call_id = 0

    def run(self, target: str) -> None:
        threading.Thread(target=self._read, name="lifeline", daemon=True).start()
        module, _, name = target.partition(":")  # such as "offbeat.trainer.worker:TrainWorker"
        try:
            handler: Handler = getattr(load_module(module), name)()
        except Exception as exc:
            self._reply(0, self._failure(exc))
            raise
        if isinstance(handler, _Reaching):
            handler.lifeline = self
        self._frame(READY, 0, b"")
        if inspect.iscoroutinefunction(handler.handle):
            asyncio.run(self._serve(handler.handle))
        else:
            self._work(handler)

    def beat(self, text: str) -> None:
        self._frame(BEAT, 0, text.encode())

    def give_up(self, error: Exception) -> None:
        self._end_call(self._failure(error))

    def _work(self, handler: Handler) -> None:
        while (frame := self._frames.get())[0] != STOP:
            kind, call_id, payload = frame
            if kind == CANCEL:
                continue  # the call has been answered, or cannot be interrupted
            self._call_id = call_id
            method, _, argument = payload.partition(b"\0")
            try:
                result = handler.handle(method.decode(), argument)
                assert isinstance(result, bytes), "only a coroutine function has anything to await"
            except Exception as exc:  # of whatever kind: the parent waits for an answer
                result = self._failure(exc)
            self._end_call(result)

    async def _serve(self, handle: Callable[[str, bytes], Coroutine[None, None, bytes]]) -> None:
        stopped = asyncio.Event()
        calls: dict[int, asyncio.Task[bytes]] = {}

        def send_outcome(call_id: int) -> None:
            call = calls.pop(call_id)
            error = asyncio.CancelledError("the caller has given up") if call.cancelled() else call.exception()
            self._reply(call_id, call.result() if error is None else self._failure(error))

        def read_frames() -> None:
            with suppress(queue.Empty):
                while True:
                    kind, call_id, payload = self._frames.get_nowait()
                    if kind == STOP:
                        stopped.set()
                    elif kind == CALL:
                        method, _, argument = payload.partition(b"\0")
                        calls[call_id] = asyncio.create_task(handle(method.decode(), argument), name=method.decode())
                        calls[call_id].add_done_callback(lambda _call, call_id=call_id: send_outcome(call_id))
                    elif call_id in calls:
                        calls[call_id].cancel()

        loop = asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(read_frames)
        read_frames()  # frames that came before there was a loop
        await stopped.wait()
        while calls:
            await asyncio.wait(calls.values())

    def _end_call(self, result: bytes | CallFailure) -> None:
        """Answer the current call unless it has already been answered."""
        with self._answering:
            call_id, self._call_id = self._call_id, 0
        if call_id:
            self._reply(call_id, result)

    def _failure(self, exc: BaseException) -> CallFailure:
        if isinstance(exc, errors.SyncError):
            return CallFailure.of(exc)  # the message says where every rank is, including this one
        return CallFailure.of(exc, f"traceback in {self._name}:\n{''.join(traceback.format_exception(exc))}")

    def _read(self) -> None:
        stream = self._connection.makefile("rb")
        while True:
            header = stream.read(HEADER.size)
            if len(header) < HEADER.size:
                os._exit(0)  # the parent is gone, and no clean-up may delay the exit
            size, call_id, kind = HEADER.unpack(header)
            payload = stream.read(size)
            if kind == STACK:
                self._frame(RESULT, call_id, thread_stacks().encode())
            else:
                self._frames.put((kind, call_id, payload))
                self._wake()

    def _reply(self, call_id: int, result: bytes | CallFailure) -> None:
        if isinstance(result, CallFailure):
            self._frame(FAILURE, call_id, result.pack())
        else:
            self._frame(RESULT, call_id, result)

    def _frame(self, kind: int, call_id: int, payload: bytes) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # a copy that user code has forked and come back from; the process itself answers
        with self._writing:
            self._connection.sendall(HEADER.pack(len(payload), call_id, kind))
            self._connection.sendall(payload)


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when the parent dies, even in native code that holds the GIL; elsewhere the lifeline does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def outlive_sigterm() -> None:
    """Arrange that SIGTERM does not end this process, because the parent decides when it has to.

    Schedulers send the signal to all processes of a job, while the parent may still need this one to save. Programs that this process
    executes, and processes that it forks, end by the signal as usual, so that user code can end its own.
    """
    signal.signal(signal.SIGTERM, _go_on)
    signal.siginterrupt(signal.SIGTERM, False)  # system calls of native code go on, too
    blocked = threading.local()

    def block() -> None:
        blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked.before)

    def end_by_it_again() -> None:
        if signal.getsignal(signal.SIGTERM) is _go_on:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    # Blocked meanwhile, or one that comes before the forked process has done anything would be lost.
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=end_by_it_again)


def _go_on(_number: int, _frame: FrameType | None) -> None:
    """A handler, because a signal that is ignored would be ignored by programs that this process executes."""


def main() -> None:
    """Entry point of the child: `python -m offbeat.process TARGET NAME FD PARENT`."""
    target, name, fd, parent = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outlive_sigterm()
    _Server(name, socket.socket(fileno=int(fd))).run(target)
