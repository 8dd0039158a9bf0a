"""Sink for Weights & Biases, offline: files in `wandb/` of the run, no network. `wandb sync runs/NAME/wandb/offline-run-*` uploads.

W&B cannot remove a logged step, so every process of a run is a separate W&B run, in the group of the run's name.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from offbeat.telemetry.sample_table import COLUMNS, TAG, MakeTable
from offbeat.telemetry.sinks import metrics_of


class WandbSink:
    """A `Sink` that writes through W&B's own process, which ends with this one."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        # W&B also reads these outside `init`. Without them it reports its own errors over the network, even when offline.
        os.environ.update(WANDB_MODE="offline", WANDB_ERROR_REPORTING="false")
        self._run = wandb.init(
            project="offbeat", group=run_dir.name, name=run_dir.name, dir=run_dir, mode="offline", config=dict(settings),
            # The terminal belongs to the console, and W&B must not record what else the machine does.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True))

    def write(self, row: Mapping[str, Any]) -> None:
        """Log at the row's global step."""
        self._run.log(metrics_of(row), step=row["global_step"])

    def write_samples(self, global_step: int, make: MakeTable) -> None:
        """Log a table at the global step, which W&B shows with a slider over the steps."""
        self._run.log({TAG: wandb.Table(columns=list(COLUMNS), data=[list(row) for row in make().rows])}, step=global_step)

    def resume_at(self, global_step: int) -> None:
        """Do nothing: the rows of earlier processes belong to other W&B runs."""

    def close(self) -> None:
        """Finish the W&B run and end W&B's process."""
        self._run.finish()
        wandb.teardown()


def open_sink(run_dir: Path, settings: Mapping[str, Any]) -> WandbSink:
    """Begin a W&B run."""
    return WandbSink(run_dir, settings)
