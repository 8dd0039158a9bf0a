"""Sink for MLflow: the experiment `offbeat` where `MLFLOW_TRACKING_URI` says, else in `mlflow.db` of the folder of runs, without a server.

Every process of a run is a separate MLflow run with the run's name, because MLflow cannot remove a logged step.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# MLflow reads these when it is imported: it would report how it is used to its makers, and write its log to the terminal.
os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_CONFIGURE_LOGGING="false")

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from offbeat.telemetry.sample_table import COLUMNS, TAG, MakeTable
from offbeat.telemetry.sinks import metrics_of

_EXPERIMENT = "offbeat"
_LONGEST_VALUE = 6000
_MOST_PARAMS, _MOST_METRICS = 100, 1000  # of one request
_TABLES, _MOST_TABLES = "mlflow.loggedArtifacts", 100
"""The tag that lists a run's tables for MLflow; its length is bounded, so it names the newest ones."""
_REFUSED = re.compile(r"[^\w\-. :/]")


class MlflowSink:
    """A `Sink` whose rows are in MLflow's store when `write` returns."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._tables: list[dict[str, str]] = []

    def write(self, row: Mapping[str, Any]) -> None:
        """Log at the row's global step."""
        at_ms, step = int(row["time_s"] * 1000), row["global_step"]
        metrics = [Metric(metric_name(name), float(value), at_ms, step) for name, value in metrics_of(row).items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])

    def write_samples(self, global_step: int, make: MakeTable) -> None:
        """Log an artifact in the layout of MLflow's `log_table`, which itself would need pandas."""
        name = f"{TAG}/step-{global_step:06d}.json"
        self._client.log_text(self._run_id, json.dumps({"columns": COLUMNS, "data": make().rows}), name)
        self._tables = [*self._tables, {"path": name, "type": "table"}][-_MOST_TABLES:]
        self._client.set_tag(self._run_id, _TABLES, json.dumps(self._tables))

    def resume_at(self, global_step: int) -> None:
        """Do nothing: the rows of earlier processes belong to other MLflow runs."""

    def close(self) -> None:
        """Say that the MLflow run has ended."""
        self._client.set_terminated(self._run_id)


def metric_name(name: str) -> str:
    """Return a metric's name with "_" in the place of signs that MLflow refuses, and of the parts "", "." and ".." of a path."""
    return "/".join("_" if part in ("", ".", "..") else part for part in _REFUSED.sub("_", name).split("/"))


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings by their whole names, such as "train.optimizer.lr", as MLflow's parameters want them: texts of bounded length."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", (value if isinstance(value, str) else json.dumps(value))[:_LONGEST_VALUE]


def open_sink(run_dir: Path, settings: Mapping[str, Any]) -> MlflowSink:
    """Begin an MLflow run, with the settings as its parameters."""
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    runs = run_dir.resolve().parent
    with _alone(runs / ".mlflow.lock", is_needed=not given):
        client = MlflowClient(tracking_uri=given or f"sqlite:///{runs / 'mlflow.db'}")
        experiment = _experiment(client, artifacts=None if given else (runs / "mlartifacts").as_uri())
        run = client.create_run(experiment, start_time=int(time.time() * 1000), run_name=run_dir.name, tags={"offbeat.run": run_dir.name})
    params = [Param(name, value) for name, value in flat_settings(settings)]
    for start in range(0, len(params), _MOST_PARAMS):
        client.log_batch(run.info.run_id, params=params[start : start + _MOST_PARAMS])
    return MlflowSink(client, run.info.run_id)


def _experiment(client: MlflowClient, *, artifacts: str | None) -> str:
    """Return the experiment's id; it is created if there is none, also by another process at the same time."""
    found = client.get_experiment_by_name(_EXPERIMENT)
    if found is None:
        try:
            return client.create_experiment(_EXPERIMENT, artifact_location=artifacts)
        except MlflowException:
            found = client.get_experiment_by_name(_EXPERIMENT)
            if found is None:
                raise
    return found.experiment_id


@contextmanager
def _alone(lock: Path, *, is_needed: bool) -> Iterator[None]:
    """Let one process at a time make the database, because MLflow creates its tables without a lock."""
    if not is_needed:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
