"""Metrics as trackio's own database finds them, in a process of its own: trackio reads its folder's name when it is imported."""

import json
import os
import subprocess
import sys

CODE = """
import json, sys
from pathlib import Path
from trackio.sqlite_storage import SQLiteStorage
from offbeat.telemetry.sample_table import SampleTable
from offbeat.telemetry.stats import StatsLogger
from offbeat.telemetry.trackio_sink import open_sink
logger = StatsLogger([open_sink(Path("runs/sort"), {"train": {"lr": 0.5}})])
first = int(sys.argv[1])
logger.resume_at(first)
for step in (first, first + 1):
    logger.commit(0, step, step, {"train/loss": 1.0 / step, "rollout/generated_tokens": 7})
    logger.write_samples(step, lambda: SampleTable([(1.0, "2+3=", "5", "5", "stop", 1, "0:7")]))
logger.close()
print(json.dumps([SQLiteStorage.get_run_records("offbeat"), SQLiteStorage.get_logs("offbeat", "sort")]))
"""


def test_every_process_of_a_run_is_a_trackio_run_on_this_machine(tmp_path):
    # A Space in the environment must not be used.
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path), "TRACKIO_SPACE_ID": "nobody/nothing"}
    for num_runs, first in ((1, 1), (2, 3)):
        shown = subprocess.run(
            [sys.executable, "-c", CODE, str(first)], env=environment, check=True, timeout=60, capture_output=True, text=True)
        runs, rows = json.loads(shown.stdout)  # trackio itself prints nothing
        assert shown.stderr == ""
        assert [run["name"] for run in runs] == ["sort"] * num_runs
        metrics = [row for row in rows if "train/loss" in row]
        assert [(row["step"], row["train/loss"], row["rollout/generated_tokens"], row["epoch"]) for row in metrics] == [
            (step, 1.0 / step, 7, 0) for step in (first, first + 1)]
        tables = [(row["step"], row["samples"]) for row in rows if "samples" in row]
        assert [step for step, _ in tables] == [first, first + 1]
        assert all(table["_type"] == "trackio.table" and table["_value"] == [
            {"reward": 1.0, "prompt": "2+3=", "completion": "5", "answer": "5", "ended by": "stop", "tokens": 1, "row": "0:7"}]
            for _, table in tables)
