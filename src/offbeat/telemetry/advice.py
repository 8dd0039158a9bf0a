"""Advice on settings that would make a run faster, given once, when the run's own figures show it. Called by the loop."""

from collections.abc import Mapping

from offbeat.config.root import Config
from offbeat.cpu import this_cpu

PUBLISH_SHARE = 0.25
"""Share of a step's time above which publishing is worth advice."""

LEAST_S = 1.0
"""Seconds below which a publish is too short to matter."""

SLOW_STEP_S = 30.0
"""Seconds after which a first step on CPUs is slow enough for advice."""

_ENOUGH_PROMPTS = 16


class PublishingAdvice:
    """Looks at the steps one after another."""

    def __init__(self, config: Config) -> None:
        self._ways = ways_to_publish_less(config)
        self._seen = 0

    def look(self, stats: Mapping[str, float]) -> str:
        """Return one sentence after the second step in a row in which publishing takes long, but only once; "" otherwise."""
        if not {"step/publish_s", "step/total_s"} <= stats.keys():  # an evaluation before the first step, or supervised fine-tuning
            return ""
        publish_s, total_s = stats["step/publish_s"], stats["step/total_s"]
        self._seen = self._seen + 1 if publish_s > max(LEAST_S, PUBLISH_SHARE * total_s) else 0
        if self._seen != 2 or not self._ways:
            return ""
        ways, self._ways = self._ways, []
        return f"publishing takes {publish_s:.1f} of {total_s:.1f} s a step; {' or '.join(ways)} would shorten it"


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


def ways_to_shorten_steps(config: Config) -> str:
    """Return a sentence of advice on a first step longer than `SLOW_STEP_S`; "" if devices or engines elsewhere compute."""
    if config.train.devices_per_rank or config.inference.devices_per_engine or config.inference.urls:
        return ""
    rollout = config.rollout
    fewer = f" ({_ENOUGH_PROMPTS} to begin with)" if rollout.consumer_batch_size > _ENOUGH_PROMPTS else ""
    return (
        f"the first step takes more than {SLOW_STEP_S:.0f} s on CPUs: it has {rollout.consumer_batch_size} prompts of {rollout.group_size}"
        f" samples with up to {rollout.max_new_tokens} new tokens each; a smaller rollout.consumer_batch_size{fewer},"
        " rollout.max_new_tokens or rollout.group_size makes steps shorter")
