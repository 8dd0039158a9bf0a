"""Where committed statistics go. The `StatsLogger` writes each row to every sink; one sink here is the run's `metrics.jsonl`.

The sinks of other projects are modules of their own, imported only when asked for.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from offbeat.errors import MissingExtraError
from offbeat.telemetry.jsonl import JsonLinesFile

_PLACE = frozenset({"step", "global_step", "time_s"})


class Sink(Protocol):
    """A destination of statistics."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Take one row: epoch, step, global_step, time_s, and the statistics by name."""

    def resume_at(self, global_step: int) -> None:
        """Forget rows with this global step or a later one; the run is about to write them again."""

    def close(self) -> None:
        """Write what is held back and let go."""


class JsonLines:
    """A `Sink` that appends to a file of JSON lines; what it wrote before stays, less the rows that a resumed run repeats.

    Attributes:
        mended: see `JsonLinesFile`.
        steps: of which it had rows when the run was resumed.
    """

    steps: frozenset[int] = frozenset()

    def __init__(self, path: Path) -> None:
        self._file = JsonLinesFile(path, is_row=lambda row: type(row.get("global_step")) is int)
        self.mended = self._file.mended

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one flushed line."""
        self._file.write(row)

    def resume_at(self, global_step: int) -> None:
        """Drop rows with this global step or a later one."""
        kept: set[int] = set()

        def is_wanted(row: Mapping[str, Any]) -> bool:
            if row["global_step"] < global_step:
                kept.add(row["global_step"])
                return True
            return False

        self._file.keep(is_wanted)
        self.steps = frozenset(kept)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row, without the columns that say where in the run it stands."""
    return {name: value for name, value in row.items() if name not in _PLACE}


def check_installed(names: Sequence[str]) -> None:
    """Refuse sinks whose package is missing, before a run begins.

    Raises:
        MissingExtraError: names the extra.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(f"telemetry.sinks has {name!r}, which is not installed; run pip install 'offbeat[{name}]'")


def open_sink(name: str, run_dir: Path, settings: Mapping[str, Any]) -> Sink:
    """Open a sink of another project.

    Args:
        name: "tensorboard", "wandb" or "trackio".
        run_dir: the run's folder; its name is the run's.
        settings: of the run, shown by the sinks that can.
    """
    # By name and not at the top: optional, and slow to import for those who do not need it.
    return importlib.import_module(f"offbeat.telemetry.{name}_sink").open_sink(run_dir, settings)
