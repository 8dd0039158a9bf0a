"""[critic]: the value model that is trained beside the policy with algorithm.centre = "critic"."""

from offbeat.config.base import Section, field
from offbeat.config.train import OptimizerConfig


class CriticConfig(Section):
    """A value model, trained on the same batches as the policy and always as a whole, also beside an adapter."""

    path: str = field(
        "", "Folder or hub id of the language model that the critic is made of; empty takes the policy's, with what a warm-up has taught"
        " it.")
    optimizer: OptimizerConfig = field(OptimizerConfig(lr=1e-5), "AdamW and its schedule.")
    warmup_steps: int = field(
        0, "First steps, in which the critic alone is trained and the policy stays as it is; they count in run.total_steps.", ge=0)
    value_clip: float = field(
        0.5, "A value that an update has moved further than this from where it was before the step earns nothing more; 0 is off.", ge=0)
    normalise: bool = field(
        False, "Learn values in units of the returns' running mean and deviation (PopArt), so that one learning rate suits rewards of any"
        " size.")
