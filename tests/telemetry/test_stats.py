"""Committing statistics to sinks."""

import time

import numpy as np

from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.sinks import JsonLinesSink
from offbeat.telemetry.stats import StatsLogger


def test_every_sink_gets_every_row_with_its_place_and_time(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    logger = StatsLogger([JsonLinesSink(path) for path in paths])
    before = time.time()
    logger.commit(1, 2, 12, {"train/loss": np.float32(0.5), "rollout/generated_tokens": 7, "count": np.int64(3)})
    logger.close()
    a, b = (read_json_lines(path) for path in paths)
    assert a == b
    assert before - 0.01 <= a[0].pop("time_s") <= time.time() + 0.01
    assert a == [{"epoch": 1, "step": 2, "global_step": 12, "train/loss": 0.5, "rollout/generated_tokens": 7, "count": 3.0}]


def test_resuming_reaches_every_sink(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    logger = StatsLogger([JsonLinesSink(path) for path in paths])
    for step in (1, 2, 3):
        logger.commit(0, step, step, {})
    logger.resume_at(3)
    logger.close()
    assert [[row["global_step"] for row in read_json_lines(path)] for path in paths] == [[1, 2], [1, 2]]
