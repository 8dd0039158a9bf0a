"""Where a run stands: which step comes next, and the controller's part of a checkpoint."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from offbeat.algorithms.coefficients import Coefficients
from offbeat.config.evaluate import EvaluateConfig
from offbeat.controller.parts import LoopPeers
from offbeat.data.identity import Identity
from offbeat.data.stream import StreamState
from offbeat.evaluation.intervals import has_fallen
from offbeat.types import Version


@dataclass(frozen=True)
class LoopStep:
    """One training step.

    Attributes:
        global_step: steps done when it ends, counted from 1.
        version: weights that it trains on from.
        next_version: weights that it publishes.
    """

    global_step: int
    version: Version
    next_version: Version

    def following(self) -> "LoopStep":
        return LoopStep(self.global_step + 1, self.next_version, self.next_version + 1)


@dataclass(frozen=True)
class SetHighlights:
    """Accuracy on an evaluation set before the first step and at the last evaluation, after `after_step` steps; None without one."""

    before: float | None = None
    after: float | None = None
    after_step: int | None = None


@dataclass(frozen=True)
class Best:
    """The evaluation with the largest value of the metric that `evaluate.keep_best` names, and the number of those after it."""

    metric: str
    value: float
    global_step: int
    num_since: int = 0

    def is_final(self, config: EvaluateConfig) -> bool:
        """Whether so many evaluations have not raised it that the run ends."""
        return self.metric == config.keep_best and 0 < config.stop_after_no_gain <= self.num_since


@dataclass(frozen=True)
class Highlights:
    """Key figures of a run, over all its resumptions.

    Attributes:
        heldout_before, heldout_after: accuracy, such as 0.41, before the first step and at the last evaluation after one; None without it.
        heldout_after_step: steps done at that last evaluation.
        heldout_prompts: prompts of that last evaluation; 0 before there was one, or if an older version wrote the checkpoint.
        max_staleness: versions between a trained token's policy and the trainer, at most.
        max_logprob_gap: largest difference of trainer's and engines' mean canary log-probability under the same weights, in nats.
        trained_tokens: of supervised fine-tuning.
        warm_up_steps: supervised steps before reinforcement learning.
        proofs: versions that engines took, each by each engine, by what they are proven; see `weights.proof.MEANS`.
        sets: accuracies on the evaluation sets, by name.
        best: the best evaluation; None without `evaluate.keep_best`.
    """

    heldout_before: float | None = None
    heldout_after: float | None = None
    heldout_after_step: int | None = None
    heldout_prompts: int = 0
    max_staleness: int = 0
    max_logprob_gap: float = 0.0
    trained_tokens: int = 0
    warm_up_steps: int = 0
    sets: dict[str, SetHighlights] = field(default_factory=dict)
    best: Best | None = None
    proofs: dict[str, int] = field(default_factory=dict)

    @property
    def heldout_fell(self) -> bool:
        """Whether held-out accuracy is lower than before the first step by more than chance explains."""
        before, after, num_prompts = self.heldout_before, self.heldout_after, self.heldout_prompts
        return before is not None and after is not None and num_prompts > 0 and has_fallen(before, after, num_prompts=num_prompts)

    def evaluated(self, name: str, accuracy: float, *, num_prompts: int, global_step: int) -> "Highlights":
        """Return these with the accuracy on a set, "" for the held-out prompts, after so many steps."""
        if not name:
            after = {"heldout_after": accuracy, "heldout_after_step": global_step, "heldout_prompts": num_prompts}
            return replace(self, **(after if global_step else {"heldout_before": accuracy}))
        measured = {"after": accuracy, "after_step": global_step} if global_step else {"before": accuracy}
        return replace(self, sets=self.sets | {name: replace(self.sets.get(name, SetHighlights()), **measured)})

    def reaching(self, *, staleness: int = 0, logprob_gap: float = 0.0) -> "Highlights":
        """Return these with the maxima of a step's staleness and of a publish's gap."""
        return replace(self, max_staleness=max(self.max_staleness, staleness), max_logprob_gap=max(self.max_logprob_gap, logprob_gap))

    def proving(self, proofs: Mapping[str, int]) -> "Highlights":
        """Return these with the engines' proofs of one more version, by what they are proven."""
        return replace(self, proofs={name: self.proofs.get(name, 0) + proofs.get(name, 0) for name in {**self.proofs, **proofs}})

    def measured(self, metric: str, value: float, *, global_step: int) -> "Highlights":
        """Return these with an evaluation of the metric that `evaluate.keep_best` names."""
        best = self.best
        if best is None or best.metric != metric or value > best.value:
            return replace(self, best=Best(metric, value, global_step))
        return replace(self, best=replace(best, num_since=best.num_since + 1))


@dataclass(frozen=True)
class HeadState:
    """Where a process that draws data stood.

    Attributes:
        in_flight: ids of prompts drawn and neither trained on nor rejected; drawn again first.
        num_flat_rejected: groups that dynamic sampling has rejected for the next step.
    """

    stream: StreamState
    in_flight: tuple[str, ...]
    num_flat_rejected: int = 0


@dataclass(frozen=True)
class SavedState:
    """The loop's part of a checkpoint. With it and the ranks' parts, no prompt that was drawn is lost.

    Attributes:
        global_step: steps done.
        version: weights published.
        heads: one per process that draws data; one in single-controller mode.
        identity: digests of settings, data, model and code; None if an older version wrote it.
        coefficients: of the next step; None if an older version wrote it, or supervised fine-tuning.
        unevaluated: statistics of the last step, if it was saved before its evaluation, where None is not finite. A run that goes on
            evaluates first, and writes the step's row of metrics then.
    """

    global_step: int
    version: Version
    heads: tuple[HeadState, ...]
    highlights: Highlights = Highlights()
    identity: Identity | None = None
    coefficients: Coefficients | None = None
    unevaluated: dict[str, float | None] | None = None


@dataclass(frozen=True)
class Decided:
    """The leader's decision on the present step: whether it is the last, and whether it has to be saved."""

    stop: bool
    save: bool


class RunState:
    """Counts steps, and knows when to stop.

    Attributes:
        asked: set when the user wants this process to stop.
        stopping: whether the present step is the last because the user said so; the same on all peers.
        finishing: whether the last step is trained, so that its evaluation, export and checkpoint are all that is left.
        saving: whether the present step has to be saved because the last checkpoint is long ago; the same on all peers.
        unevaluated: statistics of a step that is done but neither evaluated nor committed as a row, such as {"train/loss": 0.02}; None
            stands for a value that is not finite.
    """

    def __init__(self, *, total_steps: int, global_step: int = 0, version: Version = 0) -> None:
        self.total_steps = total_steps
        self.global_step = global_step
        self.version = version
        self.asked = asyncio.Event()
        self.stopping = False
        self.saving = False
        self.finishing = False
        self.highlights = Highlights()
        self.unevaluated: dict[str, float | None] | None = None

    def resume(self, saved: SavedState) -> None:
        """Go on from a checkpoint."""
        self.global_step, self.version = saved.global_step, saved.version
        self.highlights, self.unevaluated = saved.highlights, saved.unevaluated

    @property
    def last_version(self) -> Version:
        """Weights after the last step."""
        return self.version + self.total_steps - self.global_step

    @property
    def last_step(self) -> LoopStep:
        """The step that was done last."""
        return LoopStep(self.global_step, self.version - 1, self.version)

    @property
    def stopped_early(self) -> bool:
        return self.stopping and self.global_step < self.total_steps

    async def agree(self, peers: LoopPeers, *, overdue: bool = False) -> None:
        """Let the leader decide for all peers whether its user wants this step to be the last, and whether a checkpoint is overdue.

        `overdue` is this process's view, which counts if it leads.
        """

        async def decide() -> Decided:
            return Decided(stop=self.asked.is_set(), save=overdue)

        decided = await peers.lead("stop", decide, Decided)
        self.stopping, self.saving = decided.stop, decided.save

    def steps(self) -> Iterator[LoopStep]:
        """Yield the steps still to do. Each counts as done when the next is taken."""
        while self.global_step < self.total_steps and not self.stopping:
            yield LoopStep(self.global_step + 1, self.version, self.version + 1)
            self.global_step += 1
            self.version += 1
