"""[run]: the name of the run, how long it lasts, and where its files go."""

from typing import Literal

from offbeat.config.base import Section, field


class RunConfig(Section):
    """The run as a whole."""

    name: str = field("run", "Folder name of the run below `dir`.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: str = field("runs", "Folder that holds all runs.")
    mode: Literal["controller", "spmd"] = field(
        "controller", "Who runs the loop: one controller that starts the ranks and touches no device, or every rank that torchrun started.")
    seed: int = field(0, "Seed of weights, data order and sampling.", ge=0)
    total_steps: int = field(100, "Optimizer steps to train; the learning-rate schedule spans them.", ge=1)
    warm_up: bool = field(
        False, "Begin with supervised fine-tuning as [sft] says; a model from random weights earns no reward to learn from.")
    private: bool = field(
        True, "Let only this user read what the command writes; false leaves that to the umask, as where engines of another user read "
        "published weights.")
    resume: bool = field(
        True, "Go on from the newest checkpoint of this run, if there is one; false refuses to write over an existing run.")
