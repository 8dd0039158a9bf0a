"""Statistics of one step, committed once and written to every sink. The loop calls `commit`; names are `folder/name_unit`."""

import time
from collections.abc import Mapping, Sequence

from offbeat.telemetry.sample_table import MakeTable
from offbeat.telemetry.sinks import Sink


class StatsLogger:
    """Writes rows to all sinks, in the given order."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def commit(self, epoch: int, step: int, global_step: int, stats: Mapping[str, float]) -> None:
        """Write one row to every sink.

        Args:
            epoch: number of passes over the data so far.
            step: step of the run; the same as `global_step` as long as epochs have no fixed length.
            global_step: number of optimizer steps of the run.
            stats: values by metric name; numpy scalars are accepted, and integers stay integers.
        """
        row: dict[str, float] = {"epoch": epoch, "step": step, "global_step": global_step, "time_s": round(time.time(), 3)}
        row |= {name: value if isinstance(value, int) else float(value) for name, value in stats.items()}
        for sink in self._sinks:
            sink.write(row)

    def write_samples(self, global_step: int, make: MakeTable) -> None:
        """Write a table of samples of the step that was committed last to every sink that has tables; each calls `make`."""
        for sink in self._sinks:
            sink.write_samples(global_step, make)

    def resume_at(self, global_step: int) -> None:
        for sink in self._sinks:
            sink.resume_at(global_step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
