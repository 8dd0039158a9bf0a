"""Destinations of committed statistics. The `StatsLogger` writes each row to every sink; the sink here is the run's `metrics.jsonl`.

The sinks of other projects are separate modules, imported only when configured.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from offbeat.errors import MissingExtraError
from offbeat.telemetry.jsonl import JsonLinesFile
from offbeat.telemetry.sample_table import MakeTable

_PLACE = frozenset({"step", "global_step", "time_s"})


class Sink(Protocol):
    """A destination of statistics."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row: epoch, step, global_step, time_s, and the statistics by name."""

    def write_samples(self, global_step: int, make: MakeTable) -> None:
        """Write a table of samples of a step, whose row has just been written; `make` makes it."""

    def resume_at(self, global_step: int) -> None:
        """Drop rows of this global step and later ones, because the run is about to write them again."""

    def close(self) -> None:
        """Write buffered rows and release the destination."""


class JsonLinesSink:
    """A `Sink` that appends to a file of JSON lines; earlier rows stay, except those that a resumed run repeats.

    Attributes:
        steps: steps whose rows were in the file when the run was resumed.
    """

    steps: frozenset[int] = frozenset()

    def __init__(self, path: Path) -> None:
        self._file = JsonLinesFile(path, is_row=lambda row: type(row.get("global_step")) is int)
        self.mended = self._file.mended

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(row)

    def write_samples(self, global_step: int, make: MakeTable) -> None:
        """Do nothing: the folder `rollouts` beside this file has all samples."""

    def resume_at(self, global_step: int) -> None:
        kept: set[int] = set()

        def is_wanted(row: Mapping[str, Any]) -> bool:
            if row["global_step"] < global_step:
                kept.add(row["global_step"])
                return True
            return False

        self._file.keep(is_wanted)
        self.steps = frozenset(kept)

    def close(self) -> None:
        self._file.close()


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row, without the columns that identify its step."""
    return {name: value for name, value in row.items() if name not in _PLACE}


_PACKAGES = {"mlflow": ("mlflow", "alembic")}  # a local database needs alembic


def check_installed(names: Sequence[str]) -> None:
    """Refuse sinks whose package is missing, before a run begins, with a MissingExtraError that names the extra."""
    for name in names:
        if any(importlib.util.find_spec(package) is None for package in _PACKAGES.get(name, (name,))):
            raise MissingExtraError(f"telemetry.sinks has {name!r}, which is not installed; run pip install 'offbeat[{name}]'")


def open_sink(name: str, run_dir: Path, settings: Mapping[str, Any]) -> Sink:
    """Open a sink of another project, such as "wandb"; one that shows settings of runs shows these."""
    # Imported by name and not at the top of the file, since sinks are optional and slow to import.
    return importlib.import_module(f"offbeat.telemetry.{name}_sink").open_sink(run_dir, settings)
