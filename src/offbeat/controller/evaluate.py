"""Evaluation of held-out prompts and of evaluation sets, through the same engines that training uses.

The run's held-out prompts are a set without a name, and are played and judged as in training; each set with a name has a workflow, rewards
and sampling of its own (`config.evaluation_sets`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from offbeat.aio import deadline
from offbeat.config.evaluate import EvaluateConfig
from offbeat.config.root import Config
from offbeat.controller.best_model import BestModel
from offbeat.controller.inputs import RunInputs
from offbeat.controller.parts import LoopPeers, Rollouts, RolloutSource, RunParts
from offbeat.controller.state import RunState
from offbeat.controller.step_times import StepTimes
from offbeat.data.dataset import PromptDataset
from offbeat.data.reward import RIGHT
from offbeat.data.tokenizer import Tokenizer
from offbeat.data.trajectory import Group
from offbeat.errors import OffbeatError
from offbeat.evaluation.files import encode_lines
from offbeat.evaluation.samples import EvaluatedPrompt, EvaluatedSet, check_answered, read_group
from offbeat.evaluation.scores import Evaluation, score_set
from offbeat.rollout.metric import Metric

Keep = Callable[[EvaluatedSet], Awaitable[None]]
OnPrompt = Callable[[int, int], None]
"""Called when a prompt is scored, with the numbers of its right answers and of all."""


class Evaluator:
    """Evaluates the weights that the engines serve on one set."""

    def __init__(
        self, rollouts: Rollouts, rows: PromptDataset, config: EvaluateConfig, peers: LoopPeers, *, tokenizer: Tokenizer, name: str = "",
        metric: Metric | None = None,
    ) -> None:
        """`name` is the set's, "" for the run's held-out prompts; `metric` is its own. An evaluator of a set without rows is never due."""
        self._rollouts = rollouts
        self._config = config
        self._peers = peers
        self._tokenizer = tokenizer
        self._metric = metric
        self.name = name
        count = min(config.num_prompts, rows.num_rows or 0)
        self._rows = [rows.row(index) for index in range(count)]
        self._sampling = replace(rollouts.sampling, temperature=config.temperature, supports=False)

    @property
    def num_prompts(self) -> int:
        """Number of prompts that it asks."""
        return len(self._rows)

    def due(self, global_step: int, *, last: bool) -> bool:
        """Whether to evaluate after this step."""
        every = self._config.every_steps
        return bool(self._rows) and (last or (every > 0 and global_step % every == 0))

    async def run(self, keep: Keep | None = None) -> Evaluation:
        """Complete and score every prompt on the leader, which calls `keep` with all answers; all peers get the result.

        Raises:
            DeadlineError: it took longer than `evaluate.timeout_s`.
            RolloutError: not a single prompt could be scored; shows the first reason.
        """
        evaluation = await self._peers.lead("evaluate_fn", partial(self._measure, keep), Evaluation)
        await self._peers.meet("evaluate")
        return evaluation

    async def _measure(self, keep: Keep | None) -> Evaluation:
        played = await self.play()
        if keep is not None:
            await keep(played)
        return await self.score(played)

    async def score(self, played: EvaluatedSet) -> Evaluation:
        return await score(played, self._metric)

    async def play(self, on_prompt: OnPrompt = lambda _num_right, _num_answers: None) -> EvaluatedSet:
        """Complete and score every prompt in this process; errors are those of `run`."""
        config, name = self._config, self.name
        async with deadline(f"evaluation of {name}" if name else "evaluation", config.timeout_s):
            groups = await self._rollouts.rollout_batch(
                self._rows, group_size=config.samples_per_prompt, sampling=self._sampling, listener=_RightAnswers(on_prompt))
        # On a thread, as the texts of long answers would hold up the rollouts beside.
        prompts = await asyncio.to_thread(self._read_prompts, groups)
        return check_answered(EvaluatedSet(name, config.samples_per_prompt, prompts, config.pass_at))

    def _read_prompts(self, groups: Sequence[Group]) -> tuple[EvaluatedPrompt, ...]:
        return tuple(read_group(row, group, self._tokenizer) for row, group in zip(self._rows, groups, strict=True))


@dataclass(frozen=True)
class _RightAnswers:
    """Counts the right answers of groups."""

    on_prompt: OnPrompt

    def on_played(self, group: Group) -> None:
        """See `GroupListener.on_played`."""
        self.on_prompt(int((group.rewards >= RIGHT).sum()), len(group.episodes))


async def score(played: EvaluatedSet, metric: Metric | None) -> Evaluation:
    """Return the scores of a set, with its own metric's values. If that metric fails, `own_failure` says why, and the others are there."""
    evaluation = score_set(played)
    if metric is None:
        return evaluation
    try:
        return evaluation.with_own(await metric.measure(played))
    except OffbeatError as exc:
        return evaluation.with_own({}, failure=str(exc))


class RunEvaluations:
    """The evaluations of a run: those due after a step, one after the other."""

    def __init__(self, parts: RunParts, state: RunState, best: BestModel, evaluators: Sequence[Evaluator], *, keeps_samples: bool) -> None:
        self._parts = parts
        self._state = state
        self._best = best
        self._evaluators = evaluators
        self._keeps_samples = keeps_samples

    def due(self, global_step: int) -> bool:
        """Whether any set is to be evaluated after this step."""
        return any(each.due(global_step, last=global_step == self._state.total_steps) for each in self._evaluators)

    async def run(self, global_step: int, *, last: bool) -> dict[str, float]:
        """Evaluate what is due after a step, note it, and let the step be the last if nothing is gained any more.

        Returns:
            Metrics such as {"eval/accuracy": 0.41, "step/evaluate_s": 2.5}; empty if nothing was due.
        """
        parts, stats = self._parts, {}
        times = StepTimes(parts.record.tracer)
        for evaluator in self._evaluators:
            if evaluator.due(global_step, last=last):
                await parts.publisher.settle()
                with times.during("step/evaluate_s", "evaluate"):
                    evaluation = await evaluator.run(keep=partial(self._keep, global_step) if self._keeps_samples else None)
                self._note(evaluation, global_step)
                stats |= evaluation.metrics()
        if not last:
            self._best.end_without_gain(global_step)
        return stats | {"step/evaluate_s": times.total_s} if stats else {}

    def _note(self, evaluation: Evaluation, global_step: int) -> None:
        """Record and show an evaluation of one set, and count it among the highlights."""
        record, state = self._parts.record, self._state
        record.events.record("evaluation", global_step=global_step, **evaluation.metrics())
        told = f"{evaluation.title} {evaluation.accuracy:.3f} after step {global_step} ({evaluation.num_prompts} prompts)"
        record.console.note(f"{told}{evaluation.shares_text}")
        state.highlights = state.highlights.evaluated(
            evaluation.name, evaluation.accuracy, num_prompts=evaluation.num_prompts, global_step=global_step)
        self._best.compare(evaluation, global_step)
        if evaluation.own_failure:
            record.note("metric_failed", f"{evaluation.title}: evaluate.metric failed: {evaluation.own_failure}")

    async def _keep(self, global_step: int, played: EvaluatedSet) -> None:
        await self._parts.record.evaluation(global_step, played.name, encode_lines(played))


def make_evaluators(
    rollouts: Rollouts, source: RolloutSource, inputs: RunInputs, config: Config, peers: LoopPeers, *, log_dir: Path,
) -> tuple[Evaluator, ...]:
    """Return the evaluators of the run's held-out prompts, which `rollouts` plays, and of each set; metrics' processes log to `log_dir`."""
    made = [Evaluator(
        rollouts, inputs.heldout, config.timed_evaluate, peers, tokenizer=inputs.tokenizer,
        metric=Metric.of(config.evaluate, config.rollout, log_dir=log_dir))]
    for name, of_set in inputs.sets.items():
        own = config.evaluation_set(name)
        made.append(Evaluator(
            source.rollouts_of_set(name), of_set.heldout, own.timed_evaluate, peers, tokenizer=inputs.tokenizer, name=name,
            metric=Metric.of(own.evaluate, own.rollout, log_dir=log_dir)))
    return tuple(made)
