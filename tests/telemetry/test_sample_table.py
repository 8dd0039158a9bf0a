"""Tables of samples come to every sink, made on the sink's own thread, after the row of their step."""

import threading
from pathlib import Path

from offbeat.telemetry.background import BackgroundSink
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.sample_table import COLUMNS, MakeTable, SampleTable
from offbeat.telemetry.sinks import JsonLinesSink
from offbeat.telemetry.stats import StatsLogger


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def write(self, row: dict[str, float]) -> None:
        self.told.append(row["global_step"])

    def write_samples(self, global_step: int, make: MakeTable) -> None:
        self.told.append((global_step, make().rows))

    def resume_at(self, global_step: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_table_follows_the_row_of_its_step_and_is_made_where_it_is_written(tmp_path: Path) -> None:
    made: list[str] = []
    rows = [(1.0, "2+3=", "5", "5", "stop", 1, "0:7")]

    def make() -> SampleTable:
        made.append(threading.current_thread().name)
        return SampleTable(rows)

    sink = Kept()
    logger = StatsLogger([
        JsonLinesSink(tmp_path / "metrics.jsonl"), BackgroundSink("kept", lambda: sink, on_drop=lambda *_: None)])
    for step in (1, 2):
        logger.commit(0, step, step, {"reward/mean": 0.5})
        logger.write_samples(step, make)
    logger.close()
    assert sink.told == [1, (1, rows), 2, (2, rows)] and made == ["sink-kept", "sink-kept"]
    assert [row["global_step"] for row in read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert len(COLUMNS) == len(rows[0])
