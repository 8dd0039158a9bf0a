"""Sink for Weights & Biases, as [telemetry.wandb] and W&B's own variables of the environment say; by default offline.

Offline it writes files in `wandb/` of the run, without a network; `wandb sync runs/NAME/wandb/offline-run-*` uploads them. W&B cannot
remove a logged step, so every process of a run is a W&B run of its own, in the group of the run's name, unless `resume` is given.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from offbeat.errors import ConfigError
from offbeat.telemetry.sample_table import COLUMNS, TAG, MakeTable
from offbeat.telemetry.sinks import metrics_of

_QUIET = {
    "console": ("WANDB_CONSOLE", "off"), "x_disable_stats": ("WANDB_X_DISABLE_STATS", True),
    "disable_git": ("WANDB_DISABLE_GIT", True), "disable_code": ("WANDB_DISABLE_CODE", True)}
"""Settings of W&B that keep it off the terminal and from recording anything else of the machine, and their variables."""
_RESUMED_BY_ID = ("allow", "must")
_ID_FILE = "run-id.txt"


class WandbSink:
    """A `Sink` that writes through W&B's own process, which ends with this one."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """Begin a W&B run, which shows the settings of the run; `telemetry.wandb` among them says how it is kept.

        Raises ConfigError if W&B does not begin it, for example because it is online and nobody is logged in.
        """
        given = {name: value for name, value in settings.get("telemetry", {}).get("wandb", {}).items() if value}
        mode = given.get("mode") or os.environ.get("WANDB_MODE") or "offline"
        if mode != "online":  # else it reports its own errors over the network, even when offline
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        chosen = {
            "project": _unless_set("WANDB_PROJECT", "offbeat"), "group": _unless_set("WANDB_RUN_GROUP", run_dir.name),
            "name": _unless_set("WANDB_NAME", run_dir.name), "dir": _unless_set("WANDB_DIR", run_dir), **given, "mode": mode}
        if given.get("resume", os.environ.get("WANDB_RESUME")) in _RESUMED_BY_ID and "id" not in given:
            chosen["id"] = _unless_set("WANDB_RUN_ID", _id_of(run_dir))
        quiet = {name: value for name, (variable, value) in _QUIET.items() if variable not in os.environ}
        if mode != "online" and "WANDB_SILENT" not in os.environ:  # online, W&B says where the run is
            quiet["silent"] = True
        try:
            self._run = wandb.init(config=dict(settings), settings=wandb.Settings(**quiet), **chosen)
        except wandb.Error as exc:
            raise ConfigError(
                f"W&B did not begin a run, {mode} ({type(exc).__name__}: {exc}); see that 'wandb login' has been done, or set"
                " telemetry.wandb.mode = 'offline'") from exc

    def write(self, row: Mapping[str, Any]) -> None:
        """Log at the row's global step."""
        self._run.log(metrics_of(row), step=row["global_step"])

    def write_samples(self, global_step: int, make: MakeTable) -> None:
        """Log a table at the global step, which W&B shows with a slider over the steps."""
        self._run.log({TAG: wandb.Table(columns=list(COLUMNS), data=[list(row) for row in make().rows])}, step=global_step)

    def resume_at(self, global_step: int) -> None:
        """Do nothing: the rows of earlier processes belong to other W&B runs, or stay as they were logged first."""

    def close(self) -> None:
        """Finish the W&B run and end W&B's process."""
        self._run.finish()
        wandb.teardown()


def _unless_set(variable: str, value: Any) -> Any:
    """Return None, so that W&B reads the variable, where the environment has it; else the value."""
    return None if os.environ.get(variable) else value


def _id_of(run_dir: Path) -> str:
    """Return the id under which W&B keeps this run, the same whenever it is resumed."""
    path = run_dir / "wandb" / _ID_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


open_sink = WandbSink
