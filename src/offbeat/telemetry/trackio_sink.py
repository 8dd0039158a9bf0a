"""Sink for trackio, on this machine: the project `offbeat` in trackio's own folder (`TRACKIO_DIR`), which `trackio show` displays.

Every process of a run is a separate trackio run, with the run's name and in the group of that name.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio
import trackio.run

from offbeat.telemetry.sample_table import COLUMNS, TAG, MakeTable
from offbeat.telemetry.sinks import metrics_of

_LOG = logging.getLogger(__name__)


class TrackioSink:
    """A `Sink` that writes to trackio's database through trackio's thread, within a second."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        # The terminal belongs to the console, but trackio reports with print.
        trackio.run.__dict__["print"] = _LOG.debug
        # Not `trackio.init`, which also prints, and may log to a Space or a server that the environment names.
        self._run = trackio.Run(url=None, client=None, project="offbeat", name=run_dir.name, group=run_dir.name, config=dict(settings))

    def write(self, row: Mapping[str, Any]) -> None:
        """Log at the row's global step."""
        self._run.log(metrics_of(row), step=row["global_step"])

    def write_samples(self, global_step: int, make: MakeTable) -> None:
        self._run.log({TAG: trackio.Table(columns=list(COLUMNS), data=[list(row) for row in make().rows])}, step=global_step)

    def resume_at(self, global_step: int) -> None:
        """Do nothing: the rows of earlier processes belong to other trackio runs."""

    def close(self) -> None:
        """Write trackio's buffer."""
        self._run.finish()


open_sink = TrackioSink
