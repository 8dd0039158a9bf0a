"""Runs an engine on a thread of its own and lets other threads talk to it between two steps. Used by `server.EngineServer`.

The engine's thread
    consumes   commands (`submit`, `abort`, `call`) in the order in which they came, and the engine's work, one step at a time
    produces   events, handed to `deliver` in one batch per step
    waits for  a command, when there is no work; it never spins
    woken by   a command, `stop`, or once when memory of the cache has not been needed for a while
If it raises, every request that it knows fails with that error, later commands fail too, and `error` says why.
"""

import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.request import Event, Request, ScoreJob
from offbeat.engine.versions import VersionSource
from offbeat.errors import EngineError
from offbeat.pulse import Signs
from offbeat.settling import outcome_of, settle
from offbeat.sync.platform import current_platform
from offbeat.types import Version

T = TypeVar("T")

logger = logging.getLogger(__name__)


class EngineLoop:
    """An engine on its thread. `error` is why it ended, None before; `num_rounds` counts rounds, of waiting commands and a step, begun."""

    def __init__(self, engine: EmbeddedEngine, *, deliver: Callable[[list[Event]], None]) -> None:
        self.engine = engine
        self.error: EngineError | None = None
        self.num_rounds = 0
        self._deliver = deliver
        self._commands: list[tuple[Future[Any], Callable[[], Any]]] = []  # functions to run between two steps, with their futures
        self._events: list[Event] = []
        self._stopping = False
        self._busy_since_s: float | None = None
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="offbeat-engine", daemon=True)

    def start(self) -> None:
        # The model's objects live as long as the process; a garbage collection that walks them would interrupt steps for milliseconds.
        gc.collect()
        gc.freeze()
        current_platform.return_memory()  # what loading took for a moment
        self._thread.start()

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """End the thread after its current step; requests in flight fail."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    # -- from any thread ---------------------------------------------------------------------------------------------------------------

    def submit(self, request: Request | ScoreJob) -> None:
        """Queue a request and return at once; a refusal arrives as an event, as every answer does."""
        self.call(lambda: self.engine.submit(request)).add_done_callback(lambda done: self._refuse(request, done.exception()))

    def abort(self, request_id: str) -> None:
        self.call(lambda: self.engine.abort(request_id))

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function between two steps; the future receives its result or error."""
        future: Future[T] = Future()
        # From here on it cannot be cancelled: setting the result of a cancelled future would raise on the engine's thread.
        future.set_running_or_notify_cancel()
        with self._wake:
            error = self.error
            if error is None:
                self._commands.append((future, function))
                self._wake.notify()
        if error is not None:
            future.set_exception(error)
        return future

    def pause(self, mode: Literal["keep", "abort"]) -> "Future[None]":
        return self.call(lambda: self._events.extend(self.engine.pause(mode)))

    def hold_version(self, version: Version, source: VersionSource, broadcast: str = "") -> None:
        """Load or receive a version's weights in the calling thread, while the engine keeps stepping, and hold them as `version`. Blocks.

        Errors are those of `EmbeddedEngine.prepare`; the live weights continue to serve.
        """
        if not self.call(lambda: self.engine.is_staged(version, source)).result():
            live = self.call(lambda: self.engine.base_for(source.folder)).result()
            prepared = self.engine.prepare(source.folder, broadcast, live=live)
            # `prepare` may have built on a base that a switch replaced.
            if self.call(lambda: self.engine.base_for(source.folder)).result() != live:
                prepared = self.engine.prepare(source.folder, broadcast)
            self.call(lambda: self.engine.stage(version, source, prepared)).result()

    def hold_adapter(self, name: str, folder: str) -> None:
        """Load a PEFT folder in the calling thread, while the engine keeps stepping, and hold it as `name`. Blocks.

        Errors are those of `EngineAdapters.read` and `EngineAdapters.add`.
        """
        adapters = self.engine.adapters
        if not self.call(lambda: adapters.has(name, folder)).result():
            adapter = adapters.read(folder)
            self.call(lambda: adapters.add(name, folder, adapter)).result()

    # -- on the engine's thread --------------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        reason = EngineError("the engine was stopped")
        if (error := outcome_of(self._rounds).exception()) is not None:
            logger.error("the engine failed", exc_info=error)
            reason = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        self._close(reason)

    def _rounds(self) -> None:
        while not self._stopping:
            self._round()

    def _round(self) -> None:
        with self._wake:
            while not (self._commands or self.engine.has_work or self._stopping):
                self._wait()
            commands, self._commands = self._commands, []
            self._busy_since_s = time.monotonic()
            self.num_rounds += 1
        for future, function in commands:
            settle(future, function)
        self._events += self.engine.step()
        self._flush()
        self._busy_since_s = None

    def _wait(self) -> None:
        """Wait for a command; an engine without work gives back memory that it has not needed for a while."""
        at_s = self.engine.shrinks_at_s
        if not self._wake.wait(None if at_s is None else max(at_s - time.monotonic(), 0.0)):
            self.engine.shrink_cache()

    @property
    def round_s(self) -> float:
        """Seconds that the current round has taken so far, commands between steps included; 0 while there is nothing to do."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def signs(self) -> Signs:
        """Return the signs of life of the engine's thread, and of the threads that compute for it, visible now."""
        native = self._thread.native_id
        assert native is not None, "the engine has started"
        others = {thread.native_id for thread in threading.enumerate() if thread is not self._thread}
        return Signs.read(self.num_rounds, native, others)

    def _refuse(self, request: Request | ScoreJob, error: BaseException | None) -> None:
        if error is None:
            return
        refusal = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
        self._deliver([Event(request.id, refusal)])

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _close(self, reason: EngineError) -> None:
        with self._wake:
            self.error = reason
            commands, self._commands = self._commands, []
        for future, _ in commands:
            future.set_exception(reason)
        self._events += self.engine.fail(reason)
        self._flush()
