"""Metrics in the files that `wandb sync` uploads."""

import importlib
import json
import os
import struct
import subprocess
import sys

import psutil

from offbeat.loading import load_module
from offbeat.telemetry.sample_table import COLUMNS, SampleTable
from offbeat.telemetry.stats import StatsLogger

BLOCK, FILE_HEADER = 32_768, 7


def records(path):
    """What is in a .wandb file: a LevelDB log (blocks of 32 KiB; each piece has crc, length, kind) of protobuf records."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record  # only here: it takes seconds to load
    data, at, pending = path.read_bytes(), FILE_HEADER, b""
    while at < len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        pending += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last piece
            yield record.FromString(pending)
            pending = b""


def read(folder):
    """(run, rows) of each W&B run in the folder."""
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        found = list(records(path))
        rows = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in found if record.HasField("history")]
        yield next(record.run for record in found if record.HasField("run")), rows


def test_every_process_of_a_run_writes_an_offline_run_in_the_group_of_its_name(tmp_path, capfd):
    folder = tmp_path / "sort"
    folder.mkdir()
    table = SampleTable([(1.0, "2+3=", "5", "5", "stop", 1, "0:7"), (None, "p", "", "", "length", 2, "0:8")])
    open_sink = load_module("offbeat.telemetry.wandb_sink").open_sink  # only here, too
    for first in (1, 3):
        logger = StatsLogger([open_sink(folder, {"train": {"lr": 0.5}})])
        logger.resume_at(first)
        for step in (first, first + 1):
            logger.commit(0, step, step, {"train/loss": 1.0 / step, "rollout/generated_tokens": 7})
        logger.write_samples(first + 1, lambda: table)
        logger.close()
    runs = list(read(folder))
    assert len(runs) == 2
    for (run, rows), first in zip(runs, (1, 3), strict=True):
        assert (run.project, run.display_name, run.run_group) == ("offbeat", "sort", "sort")
        assert json.loads(next(item.value_json for item in run.config.update if item.key == "train")) == {"lr": 0.5}
        assert [row["_step"] for row in rows] == [first, first + 1]
        [file] = folder.glob(f"wandb/offline-run-*/files/{rows[1]['samples/path']}")
        shown = json.loads(file.read_text())
        assert rows[1]["samples/_type"] == "table-file" and shown["columns"] == list(COLUMNS)
        assert shown["data"] == [[1.0, "2+3=", "5", "5", "stop", 1, "0:7"], [None, "p", "", "", "length", 2, "0:8"]]
        assert rows[0]["train/loss"] == 1.0 / first and rows[0]["rollout/generated_tokens"] == 7 and rows[0]["epoch"] == 0
    assert capfd.readouterr() == ("", "")
    assert not [child for child in psutil.Process().children() if "wandb" in child.name()]


def test_no_wish_of_the_environment_leads_to_the_network(tmp_path):
    code = (
        "import sys, wandb; from pathlib import Path; from offbeat.telemetry.wandb_sink import open_sink\n"
        "sink = open_sink(Path(sys.argv[1]), {}); assert wandb.run.offline; sink.close()")
    environment = os.environ | {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, timeout=60)
