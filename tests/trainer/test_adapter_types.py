"""Answers cross processes, and can be read without torch."""

import subprocess
import sys

import numpy as np

from offbeat.data import wire
from offbeat.telemetry.tracker import StatsPart
from offbeat.trainer.adapter_types import AdapterPass, DatumPass, WrittenAdapter


def test_they_come_back_as_they_were():
    passed = AdapterPass(
        {"alice": StatsPart({"train/loss": 0.5}, {"train/logprob": (-3.0, 2.0)})}, np.array([0.0, -1.5], np.float32))
    again = wire.decode(AdapterPass, wire.encode(passed))
    assert again.stats == passed.stats
    assert np.array_equal(again.logprobs, passed.logprobs)
    datums = wire.decode(DatumPass, wire.encode(DatumPass(np.array([-1.5, -2.0], np.float32), np.zeros(0, np.float32))))
    assert datums.logprobs.tolist() == [-1.5, -2.0] and datums.losses.shape == (0,)
    written = WrittenAdapter("adapters/alice@1", "ab" * 16, 12)
    assert wire.decode(WrittenAdapter, wire.encode(written)) == written


def test_they_can_be_read_without_torch():
    code = "import sys, offbeat.trainer.adapter_types; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
