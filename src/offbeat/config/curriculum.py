"""[curriculum]: which prompts of a dataset are drawn again, by the rewards of their last groups."""

from offbeat.config.base import Change, Section, field


class CurriculumConfig(Section):
    """Draws prompts by difficulty, and drops solved ones. Needs rows that are drawn repeatedly, as from a file. Off by default."""

    on_resume = Change.TOLD
    read_by = ("rl",)

    pools: bool = field(
        False, "Draw prompts by difficulty: each prompt is in a pool, chosen by the mean reward of its last group, and the pool's weight is"
        " the share of epochs that draw it. The thresholds suit rewards from 0 to 1.")
    hard_up_to: float = field(0.25, "Largest mean reward of a prompt in the hard pool.")
    normal_up_to: float = field(0.75, "Largest mean reward of a prompt in the normal pool; prompts above it are easy.")
    hard_weight: float = field(0.2, "Share of epochs that draw a hard prompt; never 0, as it may become easier.", ge=0.01, le=1)
    normal_weight: float = field(1.0, "Share of epochs that draw a normal prompt, which teaches most.", ge=0.01, le=1)
    easy_weight: float = field(
        0.2, "Share of epochs that draw an easy prompt; use leave_at to stop drawing solved prompts altogether.", ge=0.01, le=1)
    unseen_weight: float = field(1.0, "Share of epochs that draw a prompt that has had no group yet.", ge=0.01, le=1)
    leave_at: float = field(
        0.0, "Stop drawing a prompt once this share of its group's samples has a reward of at least 1 (ScaleRL: 0.9); when all prompts have"
        " left, all return; 0 is off.", ge=0, le=1)

    @property
    def is_on(self) -> bool:
        """Whether draws depend on how prompts went."""
        return self.pools or self.leave_at > 0
