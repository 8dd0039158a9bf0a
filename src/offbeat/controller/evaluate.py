"""Evaluation of held-out prompts and of evaluation sets, through the same engines that training uses.

The run's held-out prompts are a set without a name, and are played and judged as in training; each set with a name has a workflow, rewards
and sampling of its own (`config.evaluation_sets`).
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from offbeat.aio import deadline
from offbeat.config.controller import EvaluateConfig
from offbeat.config.root import Config
from offbeat.controller.inputs import RunInputs
from offbeat.controller.parts import Peers, Rollouts, RolloutSource
from offbeat.data.dataset import PromptDataset
from offbeat.data.tokenizer import Tokenizer
from offbeat.data.trajectory import Group
from offbeat.evaluation.samples import EvaluatedPrompt, EvaluatedSet, check_answered, read_group
from offbeat.evaluation.scores import Evaluation, score_set

Keep = Callable[[EvaluatedSet], Awaitable[None]]


class Evaluator:
    """Evaluates the weights that the engines serve on one set."""

    def __init__(
        self, rollouts: Rollouts, rows: PromptDataset, config: EvaluateConfig, peers: Peers, *, tokenizer: Tokenizer, name: str = "",
    ) -> None:
        """Prepare it; an evaluator of a set without rows is never due.

        Args:
            tokenizer: makes texts of answers.
            name: of the set; "" for the run's held-out prompts.
        """
        self._rollouts = rollouts
        self._config = config
        self._peers = peers
        self._tokenizer = tokenizer
        self.name = name
        count = min(config.num_prompts, rows.num_rows or 0)
        self._rows = [rows.row(index) for index in range(count)]
        self._sampling = replace(rollouts.sampling, temperature=config.temperature)

    @property
    def num_prompts(self) -> int:
        """Number of prompts that it asks."""
        return len(self._rows)

    def due(self, global_step: int, *, last: bool) -> bool:
        """Whether to evaluate after this step."""
        every = self._config.every_steps
        return bool(self._rows) and (last or (every > 0 and global_step % every == 0))

    async def run(self, keep: Keep | None = None) -> Evaluation:
        """Complete and score every prompt; the leader does, and all peers get the result.

        Args:
            keep: called with all answers, on the leader alone.

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
        return score_set(played)

    async def play(self, on_prompt: Callable[[EvaluatedPrompt], None] = lambda _prompt: None) -> EvaluatedSet:
        """Complete and score every prompt in this process; errors are those of `run`.

        Args:
            on_prompt: called with each prompt as soon as it is scored.
        """
        config, name = self._config, self.name
        prompts: dict[int, EvaluatedPrompt] = {}

        def settled(index: int, group: Group) -> None:
            prompts[index] = read_group(self._rows[index], group, self._tokenizer)
            on_prompt(prompts[index])

        async with deadline(f"evaluation of {name}" if name else "evaluation", config.timeout_s):
            await self._rollouts.rollout_batch(
                self._rows, group_size=config.samples_per_prompt, sampling=self._sampling, on_group=settled)
        in_order = tuple(prompts[index] for index in range(len(self._rows)))
        return check_answered(EvaluatedSet(name, config.samples_per_prompt, in_order, config.pass_at))


def make_evaluators(
    rollouts: Rollouts, source: RolloutSource, inputs: RunInputs, config: Config, peers: Peers,
) -> tuple[Evaluator, ...]:
    """Return the evaluators of the run's held-out prompts, which `rollouts` plays, and of each evaluation set."""
    sets = (
        Evaluator(
            source.rollouts_of_set(name), of_set.heldout, config.evaluation_set(name).timed_evaluate, peers, tokenizer=inputs.tokenizer,
            name=name)
        for name, of_set in inputs.sets.items())
    return Evaluator(rollouts, inputs.heldout, config.timed_evaluate, peers, tokenizer=inputs.tokenizer), *sets
