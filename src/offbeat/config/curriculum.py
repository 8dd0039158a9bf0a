"""[curriculum]: which prompts of a dataset come again, by how their last groups went."""

from offbeat.config.base import Section, field


class CurriculumConfig(Section):
    """Difficulty pools, and prompts that are solved and leave. Needs rows that come again, as those of a file do. Off by default."""

    pools: bool = field(
        False, "Draw each prompt in the share of epochs that the weight of its pool says; its pool is given by the mean reward of its last"
        " group. Thresholds suit rewards from 0 to 1.")
    hard_up_to: float = field(0.25, "Largest mean reward of a prompt in the pool hard.")
    normal_up_to: float = field(0.75, "Largest mean reward of a prompt in the pool normal; above it is easy.")
    hard_weight: float = field(0.2, "Share of epochs that draw a hard prompt; never 0, as it may become easier.", ge=0.01, le=1)
    normal_weight: float = field(1.0, "Share of epochs that draw a normal prompt, which teaches most.", ge=0.01, le=1)
    easy_weight: float = field(0.2, "Share of epochs that draw an easy prompt; leave_at is for never.", ge=0.01, le=1)
    unseen_weight: float = field(1.0, "Share of epochs that draw a prompt that has had no group yet.", ge=0.01, le=1)
    leave_at: float = field(
        0.0, "Share of a group's samples with a reward of at least 1 from which on its prompt is not drawn any more (ScaleRL: 0.9);"
        " once all have left, all return; 0 is off.", ge=0, le=1)

    @property
    def is_on(self) -> bool:
        """Whether draws depend on how prompts went."""
        return self.pools or self.leave_at > 0
