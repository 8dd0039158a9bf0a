"""Findings: what a run's own figures show to be wrong, each a sentence with its remedy. All such sentences of a running run stand here.

`FINDINGS` is the table of those that are read from rows of metrics; `Diagnosis` reads the rows one after another. `idle_engines` reads a
minute of waiting instead, and `slow_first_step` nothing but the settings, because a row comes too late. All are pure. Only rows of this
process count: a resumed run is judged anew. Called by the loop and by the rollouts of a run; `docs/debugging.md` lists the findings.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from offbeat.agents.opening import SHORT_NAMES
from offbeat.config.root import Config
from offbeat.cpu import this_cpu
from offbeat.data.reward import RIGHT
from offbeat.rollout.idle import WaitingMinute
from offbeat.telemetry.record import RunRecord

Row = Mapping[str, float]

LATE_S = 30.0
"""Seconds after which a first step on CPUs is slow enough for advice."""
_ENOUGH_PROMPTS = 16

_MOST_ROWS = 10
_IN_A_ROW = 5
"""Number of successive steps in which all groups have equal rewards, after which a warning is given."""
_NEARLY_ALL = 0.9
_OVER = 0.5
"""Share of equal groups in the last steps below which a warning counts as heeded, so that it is given again if they come back."""
_CUT_OFF = 0.9
"""Share of truncated samples that is named as a cause."""
_COLD = 0.5
"""Temperature below which samples of a prompt are alike."""
_FAR_BELOW = 1 / 3
_FEWEST_RIGHT = 20
"""Smallest expected number of right samples in a step for which their actual number is meaningful."""
_EPSILON = 1e-6

_PUBLISH_SHARE = 0.25
"""Share of a step's time above which publishing is worth advice."""
_PUBLISH_S = 1.0
"""Seconds below which a publish is too short to matter."""

_IDLE_SHARE = 0.3
_MOST_TIMES = 20.0
"""The largest factor of more episodes that is stated; engines that are called so rarely tell little of how long a call takes."""

_GUIDE = "see `offbeat docs debugging`"


@dataclass
class Seen:
    """The rows of a run that its findings are read from.

    Attributes:
        before: the evaluation before the first step; empty without one.
        first: the first step; empty before it.
        rows: the last ten steps, the newest last.
    """

    config: Config
    warm_up_steps: int = 0
    before: Row = field(default_factory=dict)
    first: Row = field(default_factory=dict)
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=_MOST_ROWS))

    @property
    def newest(self) -> Row:
        return self.rows[-1]

    def last(self, num: int) -> list[Row]:
        """Return the last steps; empty if there were fewer."""
        return list(self.rows)[-num:] if len(self.rows) >= num else []


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that rows of metrics can show.

    Attributes:
        name: such as "slow_publishing".
        reads: metrics without which a row shows nothing of it.
        sentence: returns the sentence with its remedy, or "" if the rows do not show it.
        milder: findings that are said with this one, and so are not said after it.
        over: whether the rows show that it was heeded; it may be said again from then on. Without it, a finding is said once.
    """

    name: str
    reads: tuple[str, ...]
    sentence: "Sentence"
    milder: tuple[str, ...] = ()
    over: "Over | None" = None


Sentence = Callable[[Seen], str]
Over = Callable[[Seen], bool]


class Diagnosis:
    """Reads the rows of a run, one after another, and returns each finding when it is to be said."""

    def __init__(self, config: Config, *, warm_up_steps: int) -> None:
        """`warm_up_steps` are the supervised steps before."""
        self._seen = Seen(config, warm_up_steps)
        self._said: set[str] = set()

    def slow_start(self) -> str:
        """See `slow_first_step`."""
        return slow_first_step(self._seen.config)

    def read(self, row: Row) -> list[str]:
        """Return the sentences that the metrics of a step ask for; none for those of the evaluation before the first step."""
        seen = self._seen
        if "step/total_s" not in row:
            if not seen.rows:
                seen.before = dict(row)
            return []
        seen.first = seen.first or row
        seen.rows.append(row)
        sentences = []
        for finding in FINDINGS:
            if finding.over is not None and finding.over(seen):
                self._said.discard(finding.name)
            if finding.name in self._said or not row.keys() >= set(finding.reads):
                continue
            if sentence := finding.sentence(seen):
                self._said |= {finding.name, *finding.milder}
                sentences.append(sentence)
        return sentences


class IdleAdvice:
    """Records once that engines idle. Implements `rollout.idle.IdleListener`."""

    def __init__(self, record: RunRecord, config: Config) -> None:
        self._record, self._config = record, config
        self._told = False

    def report_minute(self, minute: WaitingMinute) -> None:
        """Note the finding, if there is one, unless it was noted before."""
        if not self._told and (sentence := idle_engines(minute, self._config)):
            self._told = True
            self._record.note("advice", sentence)


# -- nothing to learn from -------------------------------------------------------------------------------------------------------------


def _all_equal(seen: Seen) -> str:
    steps = seen.last(_IN_A_ROW)
    if not steps or any(_equal_share(step) != 1 for step in steps):
        return ""
    return _equal_rewards(seen, steps, "all groups", "so there was nothing to learn from")


def _nearly_all_equal(seen: Seen) -> str:
    steps = seen.last(_MOST_ROWS)
    if not steps or (share := _mean(map(_equal_share, steps), steps)) < _NEARLY_ALL:
        return ""
    return _equal_rewards(seen, steps, f"{share:.0%} of the groups", "so there was next to nothing to learn from")


def _mostly_differ(seen: Seen) -> bool:
    steps = seen.last(_MOST_ROWS)
    return bool(steps) and _mean(map(_equal_share, steps), steps) < _OVER


def _no_reward_yet(seen: Seen) -> str:
    step = seen.newest
    found = [seen.before.get("eval/accuracy"), seen.before.get("eval/reward_mean"), step["reward/mean"], step["reward/std"]]
    if step is not seen.first or any(each != 0 for each in found):
        return ""
    imitate = "sft.total_steps" if seen.warm_up_steps else "run.warm_up = true"
    return (
        f"every answer of the first evaluation and every sample of the first step had a reward of 0{_causes(seen, [step])}, so there"
        " is nothing to learn from yet: call the reward on an answer that you know to be right, give partial credit, make the"
        f" task easier, or imitate answers first ({imitate}); {_GUIDE}")


def _equal_rewards(seen: Seen, steps: Sequence[Row], which: str, consequence: str) -> str:
    """Return the sentence on groups of equal rewards; "" for algorithms that do not compare the samples of a group."""
    if not seen.config.algorithm.learns_from_differences:
        return ""
    means = [step["reward/mean"] for step in steps]
    constant = all(step["reward/std"] < _EPSILON * max(1.0, abs(step["reward/mean"])) for step in steps)
    same = constant and max(means) - min(means) < _EPSILON
    amount = f"{means[0]:g} in each" if same else f"{sum(means) / len(means):.3g} on average"
    larger = f"raise rollout.group_size = {seen.config.rollout.group_size}"
    if min(means) >= RIGHT:
        remedy = "every sample counts as right (a reward of 1 or more), so give harder prompts or a finer reward, or end the run"
    elif same:
        remedy = f"make the task easier or the reward finer, or {larger}"
    else:
        remedy = f"choose prompts that are neither always nor never solved, make the reward finer, or {larger}"
    return f"{which} of the last {len(steps)} steps had equal rewards ({amount}){_causes(seen, steps)}, {consequence}: {remedy}; {_GUIDE}"


def _causes(seen: Seen, steps: Sequence[Row]) -> str:
    """Return the known causes of equal rewards, as a part of a sentence."""
    rollout = seen.config.rollout
    if min(step["reward/mean"] for step in steps) >= RIGHT:
        return ""
    causes = []
    if (share := _mean((step.get("rollout/truncated_share", 0.0) for step in steps), steps)) >= _CUT_OFF:
        causes.append(f"{share:.0%} of the samples were cut off at rollout.max_new_tokens = {rollout.max_new_tokens}")
    if rollout.temperature < _COLD:
        causes.append(f"rollout.temperature = {rollout.temperature:g} makes the samples of a prompt alike")
    return f"; {' and '.join(causes)}" if causes else ""


def _equal_share(step: Row) -> float:
    return step.get("reward/zero_advantage_group_share", 0.0)


# -- a warm-up that is lost ------------------------------------------------------------------------------------------------------------


def _lost_warm_up(seen: Seen) -> str:
    """Held-out accuracy fell after a warm-up, and hardly any sample of the first step was right although the greedy answers were."""
    config, before, first, now = seen.config, seen.before, seen.first, seen.newest
    accuracy, right = before.get("eval/accuracy", 0.0), first.get("reward/right_share")
    expected = accuracy * config.rollout.group_size * config.rollout.consumer_batch_size
    if not seen.warm_up_steps or right is None or expected < _FEWEST_RIGHT or right >= _FAR_BELOW * accuracy:
        return ""
    if now["eval/accuracy_high"] >= before["eval/accuracy_low"]:
        return ""
    stop = config.sft.stop_at_accuracy
    ended_by = (
        f"to sft.stop_at_accuracy = {(1 + accuracy) / 2:.2g} (it is {stop:g})" if accuracy >= stop
        else f"with sft.total_steps above {seen.warm_up_steps}")
    return (
        f"held-out accuracy fell from {accuracy:.3f} after the warm-up to {now['eval/accuracy']:.3f}: only {right:.1%} of the samples of"
        f" the first step were right, so what was learnt from partial credit undid what was imitated; let the warm-up go on, {ended_by},"
        " and start over")


# -- slow steps ------------------------------------------------------------------------------------------------------------------------


def _slow_publishing(seen: Seen) -> str:
    """Publishing took long in the last two steps; the first step may be slow for any reason."""
    steps, now = seen.last(2), seen.newest
    if not steps or not all(_is_slow_publish(step) for step in steps) or not (ways := ways_to_publish_less(seen.config)):
        return ""
    return f"publishing takes {now['step/publish_s']:.1f} of {now['step/total_s']:.1f} s a step; {' or '.join(ways)} would shorten it"


def _is_slow_publish(step: Row) -> bool:
    return step.get("step/publish_s", 0.0) > max(_PUBLISH_S, _PUBLISH_SHARE * step["step/total_s"])


def ways_to_publish_less(config: Config) -> list[str]:
    """Return unused settings that make a version smaller or publish it sooner, such as 'model.dtype = "bfloat16" (half the bytes)'."""
    if config.model.lora.rank:
        return []
    ways = ["model.lora.rank = 16 (an adapter is a hundredth of the model)"]
    if config.model.number_format == "float32" and (config.inference.devices_per_engine or this_cpu().has_bf16):
        ways.append('model.dtype = "bfloat16" (half the bytes)')
    one_machine = config.cluster.launcher == "local" and not config.inference.urls
    if config.weights.channel == "disk" and one_machine and not config.weights_dir.is_relative_to("/dev/shm"):
        ways.append(f'weights.dir = "/dev/shm/{config.run.name}" (memory instead of a disk)')
    if config.weights.interrupt == "recompute":
        ways.append('weights.interrupt = "keep" (the cache is not computed anew)')
    return ways


def slow_first_step(config: Config) -> str:
    """Return the sentence on a first step longer than `LATE_S`; "" if devices or engines elsewhere compute."""
    if config.train.devices_per_rank or config.inference.devices_per_engine or config.inference.urls:
        return ""
    rollout = config.rollout
    fewer = f" ({_ENOUGH_PROMPTS} to begin with)" if rollout.consumer_batch_size > _ENOUGH_PROMPTS else ""
    return (
        f"the first step takes more than {LATE_S:.0f} s on CPUs: it has {rollout.consumer_batch_size} prompts of {rollout.group_size}"
        f" samples with up to {rollout.max_new_tokens} new tokens each; a smaller rollout.consumer_batch_size{fewer},"
        " rollout.max_new_tokens or rollout.group_size makes steps shorter")


# -- idle engines ----------------------------------------------------------------------------------------------------------------------


def idle_engines(minute: WaitingMinute, config: Config) -> str:
    """Return the sentence on engines that idle because all episodes that may be played wait for something else; "" if they are busy.

    To keep engines busy, the number of episodes at the same time has to grow by the factor (wait + generation) / generation, e.g. 4 for
    3 s of waiting and 1 s of generation.
    """
    besides, workers = waits_besides(config.rollout.workflow), config.rollout.reward_workers
    if minute.idle_share <= _IDLE_SHARE or not (minute.mostly_rewards or besides):
        return ""
    playing = "episodes that have a place" if minute.limit == "places" else "groups"
    said = (
        f"engines had nothing to do for {minute.idle_share:.0%} of the last minute in which groups ran, as all {playing} waited for"
        f" {'their rewards' if minute.mostly_rewards else besides}")
    if not minute.mostly_rewards:
        return f"{said}; {_more_episodes(minute, config)}"
    if minute.num_scored > workers:
        return (
            f"{said}, which {minute.num_scored:.0f} of them on average asked for at the same time; make the reward faster, or raise"
            f" rollout.reward_workers = {workers}")
    return f"{said}; make the reward faster; or else, {_more_episodes(minute, config)}"


def waits_besides(workflow: str) -> str:
    """Return the noun for a workflow's waits besides engines and rewards, such as "their tools"; "" if there are none."""
    known = {
        "single_turn": "", SHORT_NAMES["single_turn"]: "", "tool_loop": "their tools", "gym": "their environments",
        "agent": "their tools and environments"}
    return known.get(workflow, f"what {workflow} does besides")


def _more_episodes(minute: WaitingMinute, config: Config) -> str:
    """Return the limit, and the factor that would keep engines busy, as the end of a sentence."""
    share, rollout, agent = minute.idle_share, config.rollout, config.agent
    times = min(1 / (1 - share), _MOST_TIMES) if share < 1 else _MOST_TIMES
    factor = f"{times:.1f} times" if times < _MOST_TIMES else f"{_MOST_TIMES:.0f} times or more"
    noun, todo = "groups", ""
    if minute.limit == "places":
        noun, processes, each = "places", agent.processes, agent.episodes_per_process
        limit = (
            f"agent.processes = {processes} times agent.episodes_per_process = {each} are all the places there are, others wait for one")
        todo = (
            f"; set agent.episodes_per_process = {math.ceil(each * times)}, or as many times as many agent.processes if your code computes"
            " rather than waits")
    elif minute.limit == "running":
        most = (1 + rollout.max_head_offpolicyness) * rollout.consumer_batch_size
        wanted = math.ceil(rollout.max_concurrent_rollouts * times)
        limit = f"rollout.max_concurrent_rollouts = {rollout.max_concurrent_rollouts} keeps out more"
        ahead = f"; above {most}, rollout.max_head_offpolicyness or rollout.consumer_batch_size has to grow, too" if wanted > most else ""
        todo = f"; set rollout.max_concurrent_rollouts = {wanted}{ahead}"
    else:  # which is not to be raised, because it affects learning
        limit = f"rollout.max_head_offpolicyness = {rollout.max_head_offpolicyness} keeps out more"
    return f"{limit}, and {factor} as many {noun} would keep the engines busy{todo}"


def _mean(shares: Iterator[float], steps: Sequence[Row]) -> float:
    return sum(shares) / len(steps)


_REWARDS = ("reward/mean", "reward/std")

FINDINGS = (
    Finding(name="slow_publishing", reads=("step/publish_s", "step/total_s"), sentence=_slow_publishing),
    Finding(
        name="all_equal", reads=_REWARDS, sentence=_all_equal, milder=("nearly_all_equal", "no_reward_yet"), over=_mostly_differ),
    Finding(name="nearly_all_equal", reads=_REWARDS, sentence=_nearly_all_equal, milder=("no_reward_yet",), over=_mostly_differ),
    Finding(name="no_reward_yet", reads=_REWARDS, sentence=_no_reward_yet),
    Finding(name="lost_warm_up", reads=("eval/accuracy", "eval/accuracy_high"), sentence=_lost_warm_up),
)
"""The findings that are read from rows. Where several are to be said of a row, they are said in this order."""
