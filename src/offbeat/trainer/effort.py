"""One rank's effort for a training step: time of computation, tokens, operations, memory. Called by `Trainer.train_step`."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from offbeat.config.for_processes import RankConfig
from offbeat.data.cost import forward_flops
from offbeat.data.packing import PackedRow
from offbeat.sync.platform import current_platform
from offbeat.trainer.messages import Trained


class Effort:
    """Per training step: `begin_step`, then `computing` around everything that computes and `passes` for each row, then `trained`."""

    def __init__(self, model_config: Mapping[str, Any], config: RankConfig, *, ranks_per_share: int) -> None:
        """Count for a model of this configuration; `ranks_per_share` ranks run each row together, and each counts as much of it."""
        self._flops_of = forward_flops(model_config)
        self._frozen = config.model.lora.rank > 0
        self._peak = config.telemetry.peak_tflop_per_s * 1e12 or current_platform.peak_flop_per_s
        self._share = 1 / ranks_per_share
        self._watch = current_platform.stopwatch()
        self._start_s = self._tokens = self._flops = 0.0

    def begin_step(self) -> None:
        """Begin a step; counts since the step before are dropped."""
        self._watch.take_s()
        self._start_s, self._tokens, self._flops = time.time(), 0.0, 0.0

    def passes(self, row: PackedRow, *, learns: bool) -> None:
        """Count a pass over a row, forward alone or also backward if it `learns`; a row that scores nothing is not counted."""
        if len(row.target):
            self._tokens += self._share * len(row) * learns
            self._flops += self._share * self._flops_of.of_pass(row.work, learns=learns, frozen=self._frozen)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the body's time as computation."""
        self._watch.start()
        try:
            yield
        finally:
            self._watch.stop()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave the body's time, a wait for other ranks, out of the computation around it."""
        self._watch.stop()
        try:
            yield
        finally:
            self._watch.start()

    def propagate(self, loss: Tensor) -> None:
        """Run the backward pass of the scalar `loss`; its wait for other ranks at the end is not counted."""
        self._watch.stop_after_backward(loss)
        loss.backward()

    def trained(self, metrics: dict[str, float]) -> Trained:
        """Return the answer of the step that ends now."""
        busy_s = self._watch.take_s()
        return Trained(metrics, self._start_s, time.time(), busy_s, self._tokens, self._flops, self._peak, current_platform.memory())
