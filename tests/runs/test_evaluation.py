"""What `offbeat eval` refuses before anything is started. `tests/cli/test_evaluate.py` evaluates a real model."""

import io
from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat.runs.evaluation import evaluate_model
from offbeat.telemetry.console import Console
from small_run import small_config


def test_what_cannot_be_evaluated_is_told_at_once(tmp_path: Path, model_dir: str) -> None:
    console = Console("quiet", stream=io.StringIO())
    with pytest.raises(ConfigError, match="data.heldout_size is 0"):
        evaluate_model(small_config(tmp_path, model_dir, data__heldout_size="0"), console)
    with pytest.raises(ConfigError, match="model.path is empty"):
        evaluate_model(small_config(tmp_path), console)
