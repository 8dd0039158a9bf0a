"""Records of a step that is done: its row of metrics, its line on the console, its samples and rollouts, and advice.

Called by `loop`; nothing here changes the training.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from offbeat.config.telemetry import TelemetryConfig
from offbeat.controller.diagnosis import LATE_S, Diagnosis
from offbeat.controller.parts import RunParts
from offbeat.controller.samples import best_and_worst, sample_table
from offbeat.controller.state import LoopStep
from offbeat.data.batch import Batch
from offbeat.data.pieces import Pieces
from offbeat.data.rollout_records import keep_lines
from offbeat.data.stream import PromptStream
from offbeat.data.trajectory import Group
from offbeat.fleet.publication import PublishReport
from offbeat.memory import let_go
from offbeat.types import Version


class StepRecord:
    """Records of a run's steps, one after the other."""

    def __init__(self, parts: RunParts, stream: PromptStream, *, telemetry: TelemetryConfig, diagnosis: Diagnosis) -> None:
        """`stream` knows the rows that groups were drawn from."""
        self._inputs = parts.inputs
        self._config = telemetry
        self._record = parts.record
        self._stream = stream
        self._pieces = Pieces(parts.inputs.tokenizer)
        self._diagnosis = diagnosis
        self._published: dict[str, float] = {}
        """Metrics of the newest publish, for the next row."""
        self._past_groups: list[Group] = []
        """Groups of the step before; in a list of their own, as others may still read the one that they came in."""

    @asynccontextmanager
    async def timing_first_step(self) -> AsyncIterator[asyncio.TimerHandle]:
        """Show advice on shorter steps after a while, unless the timer is cancelled before."""

        def tell() -> None:
            if sentence := self._diagnosis.slow_start():
                self._record.note("advice", sentence)

        timer = asyncio.get_running_loop().call_later(LATE_S, tell)
        try:
            yield timer
        finally:
            timer.cancel()

    def published(self, version: Version, report: PublishReport) -> None:
        """Record that engines serve a version, with the report on its publishing."""
        self._published = {
            "publish/switch_s": report.switch_s, "publish/written_bytes": report.num_bytes,
            "publish/inconclusive_engines": len(report.inconclusive), "policy/canary_gap": report.canary_gap}
        self._record.events.record(
            "publish", version=version, total_s=report.total_s, write_s=report.write_s, stage_s=report.stage_s,
            switch_s=report.switch_s, canary_gap=report.canary_gap, quarantined=dict(report.quarantined),
            inconclusive=dict(report.inconclusive), num_bytes=report.num_bytes)

    async def keep_rollouts(self, step: LoopStep, groups: Sequence[Group], batch: Batch) -> None:
        """Store the groups and the batch of a step, if it is one of every `telemetry.rollouts_every_steps`."""
        if _is_every(step, self._config.rollouts_every_steps):
            rows = [self._stream.row(group.prompt_id) for group in groups]
            await self._record.rollouts(step.global_step, keep_lines(groups, rows, batch, self._pieces, step=step.global_step))

    async def commit(self, step: LoopStep, groups: Sequence[Group], stats: dict[str, float]) -> None:
        """Write a step's row, and show it with samples of `groups`; these are empty for a step of an earlier process."""
        total_s = stats["step/total_s"] + stats.get("step/evaluate_s", 0.0)
        stats = stats | {
            "step/total_s": total_s,
            "throughput/generated_tokens_per_s": stats["rollout/generated_tokens"] / total_s,
            "throughput/trained_tokens_per_s": stats["train/tokens"] / total_s,
        } | self._published
        self._published = {}
        self._record.stats.commit(self._stream.state().epoch, step.global_step, step.global_step, stats)
        self._record.console.update(step.global_step, stats)
        self.advise(stats)
        if not groups:
            return
        self._record.console.offer(partial(best_and_worst, step.global_step, groups, self._inputs.tokenizer))
        if _is_every(step, self._config.sample_tables_every_steps):
            rows = [self._stream.row(group.prompt_id) for group in groups]
            self._record.stats.write_samples(step.global_step, partial(sample_table, groups, rows, self._pieces))
        await let_go(self._past_groups)  # the console shows this step's groups by now, and the step before is stored
        self._past_groups = list(groups)

    def advise(self, stats: dict[str, float]) -> None:
        """Note the findings that a row of metrics shows."""
        for sentence in self._diagnosis.read(stats):
            self._record.note("advice", sentence)


def _is_every(step: LoopStep, every: int) -> bool:
    return bool(every) and step.global_step % every == 0
