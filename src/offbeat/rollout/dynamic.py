"""Dynamic sampling: rejects groups in which all values that credit compares are equal, such as rewards of [1, 1, 1, 1]. Pure.

A step that has rejected (`algorithm.max_draw_batches` - 1) * B such groups keeps the following ones, so that a run whose prompts are all
solved, or all hopeless, goes on. Rewards are compared before shaping: penalties for length make no group worth keeping. The executor asks
about each played group.

Source: DAPO, arXiv:2503.14476 section 3.2.
"""

from offbeat.algorithms.turns import reward_range
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.trajectory import Group
from offbeat.telemetry.tracker import StatsPart
from offbeat.types import Tell


class DynamicSampling:
    """Rejects groups of equal rewards up to the bound, and counts; a checkpoint records `num_rejected` for the batch being filled."""

    def __init__(self, config: AlgorithmConfig, *, batch_size: int, num_rejected: int = 0, warn: Tell = lambda _text: None) -> None:
        """`warn` is called once, when the bound is first reached."""
        self._config = config
        self._warn = warn
        self._has_warned = False
        self._counts = {"drawn": 0, "rejected": 0, "kept_flat": 0}
        self.max_rejected = int((config.max_draw_batches - 1) * batch_size)
        self.num_rejected = num_rejected

    def rejects(self, group: Group) -> str:
        """Return why a group is rejected; empty if it is kept."""
        self._counts["drawn"] += 1
        config = self._config
        if reward_range(group, config) > config.equal_rewards_tolerance:
            return ""
        if self.num_rejected >= self.max_rejected:
            self._counts["kept_flat"] += 1
            self._tell()
            return ""
        self._counts["rejected"] += 1
        self.num_rejected += 1
        if not group.usable:
            return "there are no rewards"
        by_turn = config.turn_credit != "episode"
        return "no turn led to more than another" if by_turn else f"all rewards are equal: {group.rewards[0]:g}"

    def start_batch(self) -> None:
        """Count anew: a batch was taken."""
        self.num_rejected = 0

    def take_stats(self) -> StatsPart:
        """Return the groups drawn, rejected, and kept although flat since the last call, and the share rejected."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return StatsPart(
            sums={f"sampling/{name}_groups": float(count) for name, count in counts.items()},
            means={"sampling/rejected_share": (float(counts["rejected"]), float(counts["drawn"]))})

    def _tell(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{self.num_rejected} groups of equal rewards were rejected for one step, as many as algorithm.max_draw_batches ="
                f" {self._config.max_draw_batches:g} allows; its batch is filled with any groups (sampling/kept_flat_groups counts, this is"
                " told once)")
