"""What a metric may return. `test_metric.py` runs it in processes."""

from pathlib import Path

import numpy as np
import pytest

from evaluation.played import played
from offbeat.data import wire
from offbeat.errors import CodeError
from offbeat.rollout.metric_worker import MetricLoadRequest, MetricRequest, MetricValues, MetricWorker, metric_values
from offbeat.user_code.handshake import Handshake

METRICS = Path(__file__).parents[1] / "support" / "metrics.py"


def loaded(name: str) -> MetricWorker:
    worker = MetricWorker()
    assert worker.handle("load", Handshake(wire.encode(MetricLoadRequest(f"{METRICS}:{name}"))).pack()) == b""
    return worker


def test_a_number_has_the_functions_name_and_a_mapping_its_own() -> None:
    assert metric_values(np.float32(0.5), "m.py:f1") == {"f1": 0.5} and metric_values(True, "m:ok") == {"ok": 1.0}
    assert metric_values({"maj@8": 1, "b.c": 0.25}, "m:f") == {"maj@8": 1.0, "b.c": 0.25}


@pytest.mark.parametrize(("name", "why"), [
    ("text", "must return a number, or a mapping of names to numbers, returned 'good'"), ("nan", "nan is not a number"),
    ("taken", "that evaluations do not have already, got 'accuracy_low'"), ("slashed", "got 'a/b'"), ("exits", "raised SystemExit: 3")])
def test_what_is_no_metric_is_told(name: str, why: str) -> None:
    with pytest.raises(CodeError, match=why):
        loaded(name).handle("measure", wire.encode(MetricRequest(played([[1.0]]).samples)))


def test_it_is_loaded_and_called_with_all_answers() -> None:
    request = wire.encode(MetricRequest(played([[1.0, 0.0], [None, 1.0]]).samples))
    assert wire.decode(MetricValues, loaded("several").handle("measure", request)).values == {"right": 2.0, "failed@1": 1.0}
