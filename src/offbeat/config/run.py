"""[run]: the name of the run, how long it lasts, and where its files go."""

from typing import Literal

from offbeat.config.base import Change, Section, field


class RunConfig(Section):
    """The run as a whole."""

    on_resume = Change.FREE

    name: str = field("run", "Folder name of the run below `dir`.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", basic=True)
    dir: str = field("runs", "Folder that holds all runs.")
    mode: Literal["controller", "spmd"] = field(
        "controller", "What runs the training loop: one controller process, which starts the ranks and uses no device itself, or every rank"
        " started by torchrun.")
    seed: int = field(0, "Seed of weights, data order and sampling.", ge=0, le=2**32 - 1, on_resume=Change.REFUSED)
    total_steps: int = field(
        100, "Optimizer steps to train; the learning-rate schedule spans them.", ge=1, on_resume=Change.TOLD, read_by=("rl",), basic=True)
    warm_up: bool = field(
        False, "Begin with supervised fine-tuning, configured in [sft]; a model with random weights earns no reward to learn from.")
    private: bool = field(
        True, "Make everything that the command writes readable by this user only; false leaves permissions to the umask, for example where"
        " engines of another user read published weights.")
    resume: bool = field(
        True, "Resume from the newest checkpoint of this run, if there is one; false refuses to overwrite an existing run.")
