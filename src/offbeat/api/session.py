"""Runs a command's work on a thread of its own, so that it also works where an event loop runs already, as in a notebook.

The calling thread waits. It calls the user's callbacks, beside which the run goes on, and turns Ctrl-C and SIGTERM into a request to end
after the step. When a run has ended, the umask, log handlers and environment variables of its process are as before.

    in_thread    consumes steps from the run's console; produces calls of callbacks; waits for a step or the end; woken by the run's thread
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from offbeat.aio import ASKED_TO_STOP, PRESSED, STOPPING, End, Terminations, listener
from offbeat.config.root import Config
from offbeat.dashboard.live_page import LivePage
from offbeat.errors import CodeError, ConfigError, RunError, StorageError
from offbeat.settling import outcome_of, settle
from offbeat.telemetry.console import Console, Mode, OnOpen, choose_mode
from offbeat.workers.worker import library_environment

T = TypeVar("T")

PRIVATE_UMASK = 0o077
"""Umask that makes new files readable by this user only."""

_INTERRUPTED = f"{STOPPING}; interrupt again to stop at once"

_LOOK_UP_S = 0.5

_RUNNING = threading.Lock()
"""Held while a run goes on: two in one process would share its log and its umask."""


class Ending:
    """Asks a run to end, from signals and callbacks. `aio.listener` calls `attach` once for each part of the run."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal may come while it is held
        self._terminations = Terminations()
        self._target: tuple[asyncio.AbstractEventLoop, End] | None = None
        self._unheard: list[str] = []
        self._asked = self._signalled = False

    def attach(self, loop: asyncio.AbstractEventLoop, end: End) -> None:
        """Send requests to `end` from now on, earlier ones that no part has received included."""
        with self._lock:
            self._target = (loop, end)
            unheard, self._unheard = self._unheard, []
        for how in unheard:
            end(how)

    def after_step(self, how: str) -> None:
        """Ask the run to end after the current step; only the first call counts."""
        if not self._asked:
            self._pass_on(how)

    def ask(self, how: str) -> None:
        """Ask the run to end, as a signal does: after its step at first, and at once if it has been asked before.

        Between two parts of the run, the next part receives the request. After the last one there is only a report to write, which is
        finished unless this is the second signal.

        Raises:
            KeyboardInterrupt: no part goes on, and there was a signal before; so only the main thread may ask then.
        """
        with self._lock:
            again, self._signalled = self._signalled, True
            if not self._pass_on(how) and again and self._target is not None:
                raise KeyboardInterrupt

    def _pass_on(self, how: str) -> bool:
        """Pass the request to the part that goes on; return whether there is one."""
        with self._lock:
            self._asked = True
            with suppress(RuntimeError):  # the loop of an earlier part is closed
                if self._target is not None:
                    self._target[0].call_soon_threadsafe(self._target[1], how)
                    return True
            self._unheard.append(how)
            return False

    def terminate(self) -> None:
        if self._terminations.asks(now_s=time.monotonic()):
            self.ask(ASKED_TO_STOP)


@dataclass(frozen=True)
class Step:
    """A finished training step, for callbacks.

        def patient(step: offbeat.Step) -> None:
            if step.metrics.get("reward/mean", 0) > 0.95:
                step.stop()

        offbeat.train(model="models/small", data="words.jsonl", callbacks=[patient])

    Attributes:
        number: steps done, from 1.
        total_steps: number of steps of the run, or of its current part, such as a warm-up.
        metrics: metrics by name, such as "reward/mean"; see docs/metrics-and-sinks.md.
        folder: folder of the run.
    """

    number: int
    total_steps: int
    metrics: Mapping[str, float]
    folder: Path
    _ending: Ending = field(repr=False, compare=False)

    def stop(self) -> None:
        """End the run after the current step; it saves a checkpoint and exports the model, and can be resumed."""
        self._ending.after_step("a callback asked to stop, so this step is the last")


Callback = Callable[[Step], object]


class StepConsole(Console):
    """A console that also hands each step to another thread."""

    def __init__(
        self, mode: Mode, inbox: "SimpleQueue[Step | None]", *, folder: Path, ending: Ending, on_open: OnOpen | None = None,
    ) -> None:
        super().__init__(mode, on_open=on_open)
        self._inbox, self._folder, self._ending = inbox, folder, ending

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        super().update(step, metrics)
        self._inbox.put(Step(step, self._total_steps, dict(metrics), self._folder, self._ending))


def run_alone(
    work: Callable[[Console], T], config: Config, *, callbacks: Sequence[Callback] = (), progress: bool = False, dashboard: bool = False,
) -> T:
    """Do `work(console)` on a thread of its own, and return its result.

    Args:
        progress: whether the console shows anything; also `telemetry.console` has to be on.
        dashboard: whether the run's live page is served beside it.

    Raises:
        ConfigError: a run goes on in this process already, or `run.mode` is not "controller".
        KeyboardInterrupt: it was interrupted or asked to stop before there was anything to keep, or twice.
        BaseException: any error of the work; or else, when the step is done and saved, the first error of a callback.
    """
    if config.run.mode != "controller":
        raise ConfigError(
            f"run.mode must be 'controller' in a Python program, got {config.run.mode!r}; SPMD mode is started by torchrun, with"
            " -m offbeat train CONFIG")
    if not _RUNNING.acquire(blocking=False):
        raise ConfigError("a run is already in progress in this process; wait for it, or start the other one in a separate process")
    try:
        ending, inbox = Ending(), SimpleQueue[Step | None]()
        mode = choose_mode(sys.stdout, enabled=progress and config.telemetry.console)

        def tell(step: Step) -> None:
            for callback in callbacks:
                callback(step)

        with _as_before(config), LivePage(config.run_dir) as page:
            console = StepConsole(mode, inbox, folder=config.run_dir, ending=ending, on_open=page.open if dashboard else None)
            return _in_thread(lambda: work(console), ending=ending, inbox=inbox, tell=tell)
    finally:
        _RUNNING.release()


def _in_thread(work: Callable[[], T], *, ending: Ending, inbox: "SimpleQueue[Step | None]", tell: Callable[[Step], None]) -> T:
    outcome: Future[T] = Future()

    def body() -> None:
        listener.set(ending.attach)  # a thread has a context of its own
        settle(outcome, work)
        inbox.put(None)

    failed: list[BaseException] = []
    thread = threading.Thread(target=body, name="offbeat run", daemon=True)
    with _terminations(ending), _interrupts(ending) as interruptible:

        def tell_interruptibly(step: Step) -> None:
            with interruptible():
                tell(step)

        thread.start()
        while (step := _next(inbox)) is not None:
            if failed:
                continue
            match outcome_of(partial(tell_interruptibly, step)).exception():
                case None:
                    pass
                case KeyboardInterrupt():
                    ending.ask(_INTERRUPTED)
                case error:  # sys.exit() too: it ends the program when the run has ended
                    failed.append(error)
                    ending.after_step("a callback has failed, so this step is the last")
        thread.join()
    if failed and not isinstance(outcome.exception(), Exception):
        raise failed[0]
    return outcome.result()


def _next(inbox: "SimpleQueue[Step | None]") -> Step | None:
    """Wait for a step or the end; looks up now and then, because a signal that the system gives another thread does not wake this one."""
    while True:
        with suppress(Empty):
            return inbox.get(timeout=_LOOK_UP_S)


@contextmanager
def _interrupts(ending: Ending) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Let SIGINT ask the run to end during the body; yields a context manager within which SIGINT raises KeyboardInterrupt instead."""
    interruptible = False

    def interrupted(_number: int, _frame: object) -> None:
        if interruptible:
            raise KeyboardInterrupt
        ending.ask(_INTERRUPTED)

    @contextmanager
    def let_interrupt() -> Iterator[None]:
        nonlocal interruptible
        interruptible = True
        try:
            yield
        finally:
            interruptible = False

    # Only the main thread has handlers, and a process in the background may ignore the signal.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(before):
        yield let_interrupt
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield let_interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _terminations(ending: Ending) -> Iterator[None]:
    """Let SIGTERM ask the run to end during the body, unless the program or its host handles or ignores it itself."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda _number, _frame: ending.terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def hearing_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM ask a command's run to end, from its first call of `aio.listener` until the body ends, report included.

    Earlier handlers hold before and after. Only for the main thread, on which the run is, too.
    """
    ending, heard = Ending(), False
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def attach(loop: asyncio.AbstractEventLoop, end: End) -> None:
        nonlocal heard
        heard = True
        # Not handlers of the loop: closing it would leave the defaults in their place.
        signal.signal(signal.SIGINT, lambda _number, _frame: ending.ask(PRESSED))
        signal.signal(signal.SIGTERM, lambda _number, _frame: ending.terminate())
        ending.attach(loop, end)

    token = listener.set(attach)
    try:
        yield
    finally:
        listener.reset(token)
        for number, handler in before.items() if heard else ():
            signal.signal(number, handler)


@contextmanager
def telling_how_to_go_on(config: Config, again: str) -> Iterator[Callable[[], None]]:
    """Print at the end how to continue the run, if the body calls the yielded function, or ends early and there is a checkpoint.

    After a failure only a checkpoint of the body's own counts, so that a run that could not begin prints its error alone. `again` is the
    command to print, such as "offbeat train task.toml"; with an empty one nothing is printed.
    """
    stopped: list[bool] = []
    before = _checkpoints(config)
    try:
        yield lambda: stopped.append(True)
    except KeyboardInterrupt:
        if _checkpoints(config):
            stopped.append(True)
        raise
    except (CodeError, RunError, StorageError):
        if _checkpoints(config) - before:
            stopped.append(True)
        raise
    finally:
        if stopped and again:
            print(f"to go on: {again}", flush=True)


def _checkpoints(config: Config) -> set[tuple[Path, int]]:
    """Return the `complete.json` of each complete checkpoint of a run, with its modification time in ns."""
    return {(mark, mark.stat().st_mtime_ns) for mark in (config.run_dir / "checkpoints").glob("*/complete.json")}


@contextmanager
def umask_of(config: Config) -> Iterator[None]:
    """Make files that are written during the body readable by this user only, if `run.private` says so."""
    umask = os.umask(PRIVATE_UMASK) if config.run.private else None
    try:
        yield
    finally:
        if umask is not None:
            os.umask(umask)


@contextmanager
def _as_before(config: Config) -> Iterator[None]:
    """Make files private during the body if `run.private` says so; afterwards the process is as it was."""
    root, level = logging.getLogger(), logging.getLogger().level
    handlers, variables = list(root.handlers), {name: os.environ.get(name) for name in library_environment(1)}
    for handler in handlers:
        root.removeHandler(handler)  # the run would close them
    try:
        with umask_of(config):
            yield
    finally:
        for handler in list(root.handlers):
            root.removeHandler(handler)
            handler.close()
        for handler in handlers:
            root.addHandler(handler)
        root.setLevel(level)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
