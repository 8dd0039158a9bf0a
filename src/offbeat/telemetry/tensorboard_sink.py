"""Sink for TensorBoard, in `tensorboard/` of the run: `tensorboard --logdir runs` compares runs.

Uses TensorBoard's own record writer, without TensorFlow or torch. Every process of a run adds a file.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]: made at import
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from offbeat.telemetry.sample_table import COLUMNS, TAG, Cell, MakeTable
from offbeat.telemetry.sinks import metrics_of


class TensorBoardSink:
    """A `Sink` whose rows are on disk when `write` returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, so the time comes first.
        self._file = (folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}").open("wb")
        self._writer = RecordWriter(self._file)
        self._write_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one event at the row's global step."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics_of(row).items()]
        self._write_event(Event(wall_time=row["time_s"], step=row["global_step"], summary=Summary(value=values)))

    def write_samples(self, global_step: int, make: MakeTable) -> None:
        """Append a table of texts, which TensorBoard shows under *Text*."""
        rows = [COLUMNS, *(tuple(map(_literal, row)) for row in make().rows)]
        self._write_event(Event(wall_time=time.time(), step=global_step, summary=text_pb(TAG, np.array(rows, dtype=object))))

    def resume_at(self, global_step: int) -> None:
        """Have TensorBoard purge older files' records of this step and later ones."""
        self._write_event(Event(wall_time=time.time(), step=global_step, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        self._file.close()

    def _write_event(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()


def _literal(cell: Cell) -> str:
    """Write a value as a block of code, so that TensorBoard does not render a model's text as Markdown."""
    return "\n".join(f"    {line}" for line in str("" if cell is None else cell).splitlines())


def open_sink(run_dir: Path, settings: Mapping[str, Any]) -> TensorBoardSink:
    """Begin a file; the settings are not shown."""
    del settings
    return TensorBoardSink(run_dir / "tensorboard")
