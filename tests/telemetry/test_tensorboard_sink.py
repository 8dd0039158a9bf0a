"""Metrics as TensorBoard's own reader finds them."""

import math
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.text.text_plugin import text_array_to_html
from tensorboard.util.tensor_util import make_ndarray

from offbeat.telemetry.sample_table import COLUMNS, SampleTable
from offbeat.telemetry.stats import StatsLogger
from offbeat.telemetry.tensorboard_sink import open_sink


def read(folder):
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_metrics_are_scalars_at_their_global_step_as_soon_as_they_are_written(tmp_path):
    logger = StatsLogger([open_sink(tmp_path, {})])
    logger.commit(0, 1, 1, {"train/loss": 0.5, "rollout/generated_tokens": 7})
    logger.commit(1, 2, 2, {"train/loss": 0.25, "bad": math.nan})
    shown = read(tmp_path)
    assert math.isnan(shown.pop("bad")[0][1])
    assert shown == {"epoch": [(1, 0.0), (2, 1.0)], "train/loss": [(1, 0.5), (2, 0.25)], "rollout/generated_tokens": [(1, 7.0)]}
    logger.close()


def test_a_resumed_run_purges_the_steps_that_it_repeats(tmp_path):
    for first, last, loss in ((1, 5, 1.0), (4, 6, 2.0)):
        logger = StatsLogger([open_sink(tmp_path, {})])
        if first > 1:
            logger.resume_at(first)
        for step in range(first, last + 1):
            logger.commit(0, step, step, {"train/loss": loss})
        logger.close()
    assert read(tmp_path)["train/loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]


def test_tables_of_samples_are_texts_that_are_shown_as_they_were_written(tmp_path):
    logger = StatsLogger([open_sink(tmp_path, {})])
    table = SampleTable([(1.0, "2+3=", "*5* | <b>\n  ok", "5", "stop", 1, "0:7"), (None, "p", "", "", "length", 2, "0:8")])
    logger.write_samples(3, lambda: table)
    logger.close()
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert accumulator.summary_metadata["samples"].plugin_data.plugin_name == "text"
    [event] = accumulator.Tensors("samples")
    cells = make_ndarray(event.tensor_proto)
    assert event.step == 3 and cells.shape == (3, len(COLUMNS)) and [cell.decode() for cell in cells[0]] == list(COLUMNS)
    shown = text_array_to_html(cells, enable_markdown=True)
    assert "*5* | &lt;b&gt;\n  ok" in shown and "<code>1.0" in shown and "None" not in shown


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_no_sink_brings_torch_into_the_controller(name):
    pytest.importorskip(name)
    code = (
        f"import sys, offbeat.telemetry.record, offbeat.telemetry.{name}_sink\n"
        "assert not {'torch', 'tensorflow', 'jax'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
