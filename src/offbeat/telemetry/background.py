"""A sink that can neither end nor delay a run. The run's record wraps the sinks of other projects in it.

The run's thread produces rows; the sink's own thread consumes them: it opens the destination, waits for the next row and writes it. A
destination that raises an error, or falls far behind, is reported once, by the run's thread, and receives nothing more.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from offbeat.settling import outcome_of
from offbeat.telemetry.sample_table import MakeTable
from offbeat.telemetry.sinks import Sink

OnDrop = Callable[[str, str], None]
"""Called with the name of a sink that gets no more metrics, and the reason."""

OpenSink = Callable[[], Sink]
"""Opens a sink, such as a connection to W&B."""

_LOG = logging.getLogger(__name__)
_MAX_WAITING = 1000  # rows; at one per step, the destination has been stuck for a long time
_CLOSE_S = 15.0  # for queued rows; a working destination has closed the files of a run by then

Task = Callable[[Sink], None]


class BackgroundSink:
    """A `Sink` that hands every call to a thread of its own and never raises."""

    def __init__(self, name: str, open_sink: OpenSink, *, on_drop: OnDrop, close_s: float = _CLOSE_S) -> None:
        """Begin to open the destination.

        Args:
            open_sink: called in the sink's thread.
            on_drop: called at most once, in the thread that calls this object.
            close_s: seconds that `close` waits for queued rows.
        """
        self._name = name
        self._open_sink = open_sink
        self._on_drop = on_drop
        self._close_s = close_s
        self._tasks: queue.Queue[Task | None] = queue.Queue(_MAX_WAITING)
        self._failure = ""
        self._is_dropped = False
        self._thread = threading.Thread(target=self._work, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, Any]) -> None:
        self._put(lambda sink: sink.write(row))

    def write_samples(self, global_step: int, make: MakeTable) -> None:
        self._put(lambda sink: sink.write_samples(global_step, make))

    def resume_at(self, global_step: int) -> None:
        self._put(lambda sink: sink.resume_at(global_step))

    def close(self) -> None:
        """Wait, for a limited time, until everything is written."""
        self._put(None)
        if not self._is_dropped:
            self._thread.join(self._close_s)
            if self._thread.is_alive():
                self._drop(f"it was still writing {self._close_s:g} s after the end of the run")
        self._report()

    def _put(self, task: Task | None) -> None:
        self._report()
        if self._is_dropped:
            return
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self._drop(f"it fell {_MAX_WAITING} rows behind")

    def _report(self) -> None:
        if self._failure:
            self._drop(self._failure)

    def _drop(self, reason: str) -> None:
        if not self._is_dropped:
            self._is_dropped = True
            _LOG.warning("sink %s gets no more metrics: %s; metrics.jsonl has them all", self._name, reason)
            self._on_drop(self._name, reason)

    def _work(self) -> None:
        error = outcome_of(self._serve).exception()  # the run goes on after any error, even an exit
        if error is not None:
            _LOG.debug("sink %s raised", self._name, exc_info=error)
            self._failure = f"{type(error).__name__}: {error}"

    def _serve(self) -> None:
        sink = self._open_sink()
        while (task := self._tasks.get()) is not None:
            task(sink)
        sink.close()
