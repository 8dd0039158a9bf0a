"""Metrics for tests, some of which misbehave."""

import os
import sys
import time


def mean_length(samples):
    return sum(len(sample.text) for sample in samples) / len(samples)


def several(samples):
    assert all(sample.row.answer == str(sample.index) for sample in samples)
    return {"right": sum(sample.is_right for sample in samples), "failed@1": sum(sample.reward is None for sample in samples)}


def raises(samples):
    raise ValueError("no such thing")


def exits(samples):
    sys.exit(3)


def dies(samples):
    os._exit(4)


def hangs(samples):
    time.sleep(3600)


def text(samples):
    return "good"


def nan(samples):
    return {"x": float("nan")}


def taken(samples):
    return {"accuracy_low": 1.0}


def slashed(samples):
    return {"a/b": 1.0}


def secret(samples):
    return {"seen": float("MY_API_KEY" in os.environ)}
