"""Metrics, parameters and tables as MLflow's own client finds them in its database, written by processes of their own."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from offbeat.loading import load_module

# Found but not loaded, which takes seconds that every process of a test run would spend.
pytestmark = pytest.mark.skipif(not (find_spec("mlflow") and find_spec("alembic")), reason="needs mlflow and alembic")

WRITE = """
import math, sys
from pathlib import Path
from offbeat.telemetry.mlflow_sink import open_sink
from offbeat.telemetry.sample_table import SampleTable
from offbeat.telemetry.stats import StatsLogger
first = int(sys.argv[1])
logger = StatsLogger([open_sink(Path("runs/sort"), {"run": {"name": "sort"}, "train": {"optimizer": {"lr": 0.5}}, "sinks": ["a", "b"]})])
logger.resume_at(first)
for step in (first, first + 1):
    logger.commit(0, step, step, {"train/loss": 1.0 / step, "rollout/generated_tokens": 7, 'reward/a "name"_mean': 0.25, "bad": math.nan})
    logger.write_samples(step, lambda: SampleTable([(1.0, "2+3=", "5 | <b>", "5", "stop", 1, "0:7"), (None, "p", "", "", "length", 2, "0:8")]))
logger.close()
"""  # noqa: E501
READ = """
import json
import mlflow
mlflow.set_tracking_uri("sqlite:///runs/mlflow.db")
client = mlflow.MlflowClient()
experiment = client.get_experiment_by_name("offbeat").experiment_id
found = []
for run in client.search_runs([experiment], order_by=["start_time"]):
    own = run.info.run_id
    table = [file.path for file in client.list_artifacts(own, "samples")][0]
    found.append({
        "name": run.info.run_name, "status": run.info.status, "params": run.data.params, "tags": run.data.tags,
        "metrics": {
            name: [(each.step, each.value, each.timestamp) for each in client.get_metric_history(own, name)] for name in run.data.metrics},
        "table": json.loads(client.load_table(experiment, table, [own]).to_json(orient="columns"))})
print(json.dumps(found))
"""
KNOWN = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}


def run(code: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, env=KNOWN | {"MLFLOW_DISABLE_TELEMETRY": "true"}, check=True, timeout=200,
        capture_output=True, text=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with what two processes of a run have logged."""
    folder = tmp_path_factory.mktemp("mlflow")
    (folder / "runs" / "sort").mkdir(parents=True)
    for first in (1, 3):
        done = run(WRITE, folder, str(first))
        assert (done.stdout, done.stderr) == ("", ""), "the terminal belongs to the console"
    return folder


@pytest.fixture(scope="module")
def runs(written: Path) -> list[dict[str, Any]]:
    """Those runs as MLflow reads them."""
    return json.loads(run(READ, written).stdout)


@pytest.mark.drill
def test_every_process_of_a_run_is_an_mlflow_run_in_one_local_database(written: Path, runs: list[dict[str, Any]]) -> None:
    assert [each["name"] for each in runs] == ["sort", "sort"] and {each["status"] for each in runs} == {"FINISHED"}
    for each, first in zip(runs, (1, 3), strict=True):
        assert each["params"] == {"run.name": "sort", "train.optimizer.lr": "0.5", "sinks": '["a", "b"]'}
        loss = each["metrics"]["train/loss"]
        assert [(step, value) for step, value, _ in loss] == [(first, 1.0 / first), (first + 1, 1.0 / (first + 1))]
        assert all(at > 1.7e12 for _, _, at in loss) and each["metrics"]["rollout/generated_tokens"][0][1] == 7
        assert each["metrics"]["reward/a _name__mean"][0][1] == 0.25 and math.isnan(each["metrics"]["bad"][0][1])
    assert sorted(path.name for path in (written / "runs").iterdir()) == [".mlflow.lock", "mlartifacts", "mlflow.db", "sort"]


@pytest.mark.drill
def test_tables_of_samples_are_tables_of_mlflow(runs: list[dict[str, Any]]) -> None:
    for each, first in zip(runs, (1, 3), strict=True):
        assert json.loads(each["tags"]["mlflow.loggedArtifacts"]) == [
            {"path": f"samples/step-00000{step}.json", "type": "table"} for step in (first, first + 1)]
        assert {name: each["table"][name] for name in ("reward", "completion", "ended by", "tokens")} == {
            "reward": {"0": 1.0, "1": None}, "completion": {"0": "5 | <b>", "1": ""}, "ended by": {"0": "stop", "1": "length"},
            "tokens": {"0": 1, "1": 2}}


@pytest.fixture
def sink() -> ModuleType:
    """The module of the sink, which loads MLflow."""
    return load_module("offbeat.telemetry.mlflow_sink")


def test_names_and_settings_are_such_as_mlflow_takes(sink: ModuleType) -> None:
    metric_name, flat_settings = sink.metric_name, sink.flat_settings
    assert metric_name("train/loss_mean") == "train/loss_mean"
    assert metric_name("reward/../a//b,c") == "reward/_/a/_/b_c" and metric_name("reward/ä_mean") == "reward/ä_mean"
    assert dict(flat_settings({"a": {"b": {"c": None}}, "text": "x" * 7000})) == {"a.b.c": "null", "text": "x" * 6000}


def test_the_address_of_the_environment_says_where_metrics_go(
    sink: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "sort").mkdir(parents=True)
    sink.open_sink(tmp_path / "runs" / "sort", {}).close()
    assert (tmp_path / "elsewhere.db").exists() and [path.name for path in (tmp_path / "runs").iterdir()] == ["sort"]
