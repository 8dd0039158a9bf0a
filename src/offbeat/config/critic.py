"""[critic]: the value model that is trained beside the policy with algorithm.centre = "critic"."""

from offbeat.config.base import Change, Section, field
from offbeat.config.train import OptimizerConfig


class CriticConfig(Section):
    """A value model, trained on the same batches as the policy and always as a whole, also beside an adapter."""

    on_resume = Change.TOLD
    read_by = ("rl",)

    path: str = field(
        "", "Folder or hub id of the language model that initialises the critic; empty takes the policy's, after its warm-up if there is"
        " one.")
    optimizer: OptimizerConfig = field(OptimizerConfig(), "AdamW and its schedule.", basic=False)
    warmup_steps: int = field(
        0, "First steps, in which the critic alone is trained and the policy stays as it is; they count in run.total_steps.", ge=0)
    value_clip: float = field(
        0.5, "Clip range of the value loss: moving a value further than this within one step is not rewarded; 0 is off.", ge=0)
    normalise: bool = field(
        False, "Learn values in units of the returns' running mean and deviation (PopArt), so that one learning rate suits rewards of any"
        " size.")
