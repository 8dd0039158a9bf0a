"""The metrics file."""

import json

from offbeat.telemetry.sinks import JsonLines


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_drops_the_rows_that_it_will_write_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    for step in range(1, 6):
        sink.write({"global_step": step, "loss": float(step)})
    sink.close()
    resumed = JsonLines(path)
    resumed.resume_at(4)
    resumed.write({"global_step": 4, "loss": 40.0})
    resumed.close()
    assert [(row["global_step"], row["loss"]) for row in rows(path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_resuming_at_the_first_step_empties_the_file(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write({"global_step": 0})
    sink.resume_at(0)
    sink.close()
    assert rows(tmp_path / "metrics.jsonl") == []
