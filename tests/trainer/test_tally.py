"""Sums and maxima of a step, against numpy."""

import numpy as np
import torch

from offbeat.trainer.tally import Tally
from ranks import run_alone


def test_sums_and_maxima_cover_all_that_was_collected():
    rng = np.random.default_rng(0)
    parts = [rng.random(size, dtype=np.float32) for size in (5, 0, 7)]
    tally = Tally()
    for part in parts:
        values = torch.from_numpy(part).requires_grad_()
        tally.add({"a": values, "b": values > 0.5})
        tally.raise_to({"c": values})
    everything = np.concatenate(parts)
    sums, maxima = run_alone(lambda groups, _: tally.reduce(groups.cpu_group))
    np.testing.assert_allclose(sums["a"], everything.astype(np.float64).sum(), rtol=1e-12)
    assert sums["b"] == (everything > 0.5).sum()
    assert maxima == {"c": everything.max()}


def test_no_values_and_no_names_are_fine():
    tally = Tally()
    tally.add({"a": torch.zeros(0)})
    assert run_alone(lambda groups, _: tally.reduce(groups.cpu_group)) == ({"a": 0.0}, {})
    tally.raise_to({"b": torch.zeros(0)})
    assert run_alone(lambda groups, _: tally.reduce(groups.cpu_group)) == ({"a": 0.0}, {"b": 0.0})
