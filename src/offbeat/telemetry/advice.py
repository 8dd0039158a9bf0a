"""Advice on what would make a run faster, given once, when the run's own figures show it. Called by the loop."""

from collections.abc import Mapping

from offbeat.config.root import Config

PUBLISH_SHARE = 0.25
"""Share of a step's time above which publishing is worth advice."""

LEAST_S = 1.0
"""Seconds below which a publish is too short to matter."""


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
    """Return settings that make a version smaller or bring it to the engines sooner, as far as the run does not use them yet."""
    if config.model.lora.rank:
        return []
    ways = ["model.lora.rank = 16 (an adapter is a hundredth of the model)"]
    if config.model.dtype == "float32":
        ways.append('model.dtype = "bfloat16" (half the bytes)')
    one_machine = config.cluster.launcher == "local" and not config.inference.urls
    if config.weights.channel == "disk" and one_machine and not config.weights_dir.is_relative_to("/dev/shm"):
        ways.append(f'weights.dir = "/dev/shm/{config.run.name}" (memory instead of a disk)')
    if config.weights.interrupt == "recompute":
        ways.append('weights.interrupt = "keep" (the cache is not computed anew)')
    return ways
