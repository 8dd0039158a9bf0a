"""Metrics in the files that `wandb sync` uploads."""

import importlib
import json
import os
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


OPEN = """
import json, os, sys
from pathlib import Path
import wandb
from offbeat.telemetry.wandb_sink import open_sink
before = {name: value for name, value in os.environ.items() if name.startswith("WANDB_") and name != "WANDB_ERROR_REPORTING"}
sink = open_sink(Path(sys.argv[1]), json.loads(sys.argv[2]))
run = wandb.run
print(json.dumps([run.project, run.entity, run.name, run.group, run.id, run.settings.mode, run.settings.resume, run.settings.wandb_dir]))
sink.close()
assert before == {name: os.environ[name] for name in before}
"""


def open_in(folder, variables, **given):
    """Open a sink in a process that has these variables of W&B alone."""
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", OPEN, str(folder), json.dumps({"telemetry": {"wandb": given}})], capture_output=True, text=True, timeout=200,
        env={name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | variables)


def opened(folder, variables, **given):
    """(project, entity, name, group, id, mode, resume, folder) of the W&B run that settings and variables of the environment lead to."""
    done = open_in(folder, variables, **given)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_settings_say_where_a_run_is_kept_and_else_the_variables_of_the_environment(tmp_path):
    variables = {
        "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team", "WANDB_NAME": "second", "WANDB_RUN_GROUP": "sweep", "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path / "elsewhere")}
    (tmp_path / "elsewhere").mkdir()
    project, entity, name, group, _, mode, _, at = opened(tmp_path / "a", variables)
    assert (project, entity, name, group, mode) == ("theirs", "team", "second", "sweep", "offline")
    assert at.startswith(str(tmp_path / "elsewhere"))
    project, entity, name, group, number, mode, resume, at = opened(
        tmp_path / "b", {**variables, "WANDB_DIR": "", "WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9"},
        project="mine", entity="us", name="first", mode="offline", id="one", resume="allow")
    assert (project, entity, name, number, mode, resume) == ("mine", "us", "first", "one", "offline", "allow")
    assert at.startswith(str(tmp_path / "b"))


def test_a_resumed_run_has_the_same_id_and_one_that_begins_anew_another(tmp_path):
    id_of = load_module("offbeat.telemetry.wandb_sink")._id_of
    first = id_of(tmp_path / "a")
    assert first == id_of(tmp_path / "a") != id_of(tmp_path / "b")


class Closed(BaseHTTPRequestHandler):
    """A server that knows nobody."""

    def do_POST(self):
        self.server.asked.append(self.path)
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(401)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_online_the_server_is_asked_and_one_that_knows_nobody_is_an_error(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Closed) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        variables = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}"}
        done = open_in(tmp_path, variables, mode="online")
        server.shutdown()
    assert server.asked and "ConfigError: W&B did not begin a run, online (CommError: " in done.stderr and done.returncode == 1
