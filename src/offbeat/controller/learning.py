"""Advice for a run whose own rewards show that it cannot learn. Called by the loop after an evaluation and each step.

Pure. Only steps of this process count: a resumed run is judged anew.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from offbeat.config.root import Config
from offbeat.data.reward import RIGHT

_ALL_IN_A_ROW = 5
"""Number of successive steps in which all groups have equal rewards, after which a warning is given."""

_LAST = 10
_NEARLY_ALL = 0.9
_OVER = 0.5
"""Share of flat groups in the last steps below which a warning counts as heeded, so that it is given again if they come back."""

_CUT_OFF = 0.9
"""Share of truncated samples that is named as a cause."""

_COLD = 0.5
"""Temperature below which samples of a prompt are alike."""

_FAR_BELOW = 1 / 3
_FEWEST_RIGHT = 20
"""Smallest expected number of right samples in a step for which their actual number is meaningful."""

_GUIDE = "see `offbeat docs debugging`"
_EPSILON = 1e-6


class _Level(IntEnum):
    """How little there is to learn from."""

    NOTHING_WRONG = 0
    NO_REWARD_YET = 1
    NEARLY_ALL_FLAT = 2
    ALL_FLAT = 3


@dataclass(frozen=True)
class _Step:
    """The rewards of a step: share of groups in which all are equal, mean and deviation over all samples, and share of cut-off samples."""

    flat_share: float
    mean: float
    std: float
    truncated_share: float

    @property
    def is_constant(self) -> bool:
        return self.std < _EPSILON * max(1.0, abs(self.mean))


class LearningAdvice:
    """Judges the first evaluation, then each step."""

    def __init__(self, config: Config, *, warm_up_steps: int) -> None:
        """`warm_up_steps` are the supervised steps before."""
        self._config = config
        self._warm_up_steps = warm_up_steps
        self._compares = config.algorithm.learns_from_differences
        self._before: Mapping[str, float] = {}
        self._warmed_up: Mapping[str, float] = {}
        """The evaluation after the warm-up, if samples of the first step were right much less often."""
        self._steps: deque[_Step] = deque(maxlen=_LAST)
        self._told = _Level.NOTHING_WRONG

    def look(self, stats: Mapping[str, float]) -> str:
        """Return advice on the metrics of a step, or of the evaluation before the first; "" for none.

        A warning is given once, and again when it has become worse, or comes back after half of the groups differed.
        """
        if "reward/mean" not in stats:
            self._before = {} if self._steps else dict(stats)
            return ""
        step = _Step(
            stats.get("reward/zero_advantage_group_share", 0.0), stats["reward/mean"], stats["reward/std"],
            stats.get("rollout/truncated_share", 0.0))
        self._steps.append(step)
        before, self._before = self._before, {}
        if self._is_far_below(before, stats):
            self._warmed_up = {**before, "reward/right_share": stats["reward/right_share"]}
        level = self._level(before, step)
        if len(self._steps) == _LAST and _mean([each.flat_share for each in self._steps]) < _OVER:
            self._told = _Level.NOTHING_WRONG
        if level > self._told:
            self._told = level
            return self._warning(level)
        return self._of_warm_up(stats)

    def _level(self, before: Mapping[str, float], step: _Step) -> _Level:
        steps = list(self._steps)
        if self._compares and len(steps) >= _ALL_IN_A_ROW and all(each.flat_share == 1 for each in steps[-_ALL_IN_A_ROW:]):
            return _Level.ALL_FLAT
        if self._compares and len(steps) == _LAST and _mean([each.flat_share for each in steps]) >= _NEARLY_ALL:
            return _Level.NEARLY_ALL_FLAT
        rewards = [before.get("eval/accuracy"), before.get("eval/reward_mean"), step.mean, step.std]
        return _Level.NOTHING_WRONG if any(each != 0 for each in rewards) else _Level.NO_REWARD_YET

    def _warning(self, level: _Level) -> str:
        steps = list(self._steps)[-_ALL_IN_A_ROW:] if level == _Level.ALL_FLAT else list(self._steps)
        if level == _Level.NO_REWARD_YET:
            imitate = "sft.total_steps" if self._warm_up_steps else "run.warm_up = true"
            return (
                f"every answer of the first evaluation and every sample of the first step had a reward of 0{self._causes(steps)}, so there"
                " is nothing to learn from yet: call the reward on an answer that you know to be right, give partial credit, make the"
                f" task easier, or imitate answers first ({imitate}); {_GUIDE}")
        means = [each.mean for each in steps]
        same = all(each.is_constant for each in steps) and max(means) - min(means) < _EPSILON
        amount = f"{means[0]:g} in each" if same else f"{_mean(means):.3g} on average"
        flat_share = _mean([each.flat_share for each in steps])
        which = "all groups" if level == _Level.ALL_FLAT else f"{flat_share:.0%} of the groups"
        what = "so there was nothing to learn from" if level == _Level.ALL_FLAT else "so there was next to nothing to learn from"
        return (
            f"{which} of the last {len(steps)} steps had equal rewards ({amount}){self._causes(steps)}, {what}:"
            f" {self._remedy(means, same)}; {_GUIDE}")

    def _causes(self, steps: Sequence[_Step]) -> str:
        """Return the known causes of equal rewards, as a part of a sentence."""
        rollout = self._config.rollout
        if min(each.mean for each in steps) >= RIGHT:
            return ""
        causes = []
        if (share := _mean([each.truncated_share for each in steps])) >= _CUT_OFF:
            causes.append(f"{share:.0%} of the samples were cut off at rollout.max_new_tokens = {rollout.max_new_tokens}")
        if rollout.temperature < _COLD:
            causes.append(f"rollout.temperature = {rollout.temperature:g} makes the samples of a prompt alike")
        return f"; {' and '.join(causes)}" if causes else ""

    def _remedy(self, means: Sequence[float], same: bool) -> str:
        larger = f"raise rollout.group_size = {self._config.rollout.group_size}"
        if min(means) >= RIGHT:
            return "every sample counts as right (a reward of 1 or more), so give harder prompts or a finer reward, or end the run"
        if same:
            return f"make the task easier or the reward finer, or {larger}"
        return f"choose prompts that are neither always nor never solved, make the reward finer, or {larger}"

    def _is_far_below(self, before: Mapping[str, float], stats: Mapping[str, float]) -> bool:
        """Whether hardly any sample of a step is right although the greedy answers after a warm-up were."""
        accuracy, right, rollout = before.get("eval/accuracy", 0.0), stats.get("reward/right_share"), self._config.rollout
        expected = accuracy * rollout.group_size * rollout.consumer_batch_size
        return self._warm_up_steps > 0 and right is not None and expected >= _FEWEST_RIGHT and right < _FAR_BELOW * accuracy

    def _of_warm_up(self, stats: Mapping[str, float]) -> str:
        """Return a remark, once, if held-out accuracy fell after a warm-up because hardly any sample was right."""
        before, config = self._warmed_up, self._config
        if not before or stats.get("eval/accuracy_high", 1.0) >= before["eval/accuracy_low"]:
            return ""
        self._warmed_up = {}
        accuracy, stop = before["eval/accuracy"], config.sft.stop_at_accuracy
        ended_by = (
            f"to sft.stop_at_accuracy = {(1 + accuracy) / 2:.2g} (it is {stop:g})" if accuracy >= stop
            else f"with sft.total_steps above {self._warm_up_steps}")
        return (
            f"held-out accuracy fell from {accuracy:.3f} after the warm-up to {stats['eval/accuracy']:.3f}: only"
            f" {before['reward/right_share']:.1%} of the samples of the first step were right, so what was learnt from partial credit undid"
            f" what was imitated; let the warm-up go on, {ended_by}, and start over")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
