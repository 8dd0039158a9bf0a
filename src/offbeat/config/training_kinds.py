"""One kind of training: its names, its words in commands and messages, and where its lesson is. Torch-free.

A kind is declared by its section of the configuration, as `training`; `config.root.TRAINING_KINDS` is the table of all, which command
line, Python interface, run folders, learning rates, resumption and model cards read. The lesson, in `controller`, makes batches of rows.
"""

from dataclasses import dataclass

from offbeat.config.rates import Task


@dataclass(frozen=True)
class TrainingKind:
    """One kind of training.

    Attributes:
        command: its command, such as "reward-model"; with underscores, its function in Python.
        section: name of its section of the configuration, such as "reward_model".
        checkpoints: first word of its checkpoints' names, such as "dpo" in "dpo-00000050".
        lesson: module of `offbeat.controller` and class, such as "preference:PreferenceLesson"; "" for reinforcement learning.
        summary: its line in the list of commands.
        description, examples: of the command's help.
        data: help of `--data`.
        python: first line and example of its function in Python; "" for reinforcement learning, whose function takes more.
        word: adjective of its steps in messages, such as "supervised"; "" for none.
        method: noun for it on a model card, such as "supervised fine-tuning".
        named_by: setting that says which method exactly, such as "preference.loss"; "" if there is one method alone.
        metrics: folders of the metrics that it alone has, such as ("preference",), by which old runs are told apart.
        rates: row of `config.rates` for a learning rate of "auto".
        pairs: whether its rows are pairs of answers.
        imitates: whether the answers of its rows are imitated.
    """

    command: str
    section: str
    checkpoints: str
    lesson: str
    summary: str
    description: str
    examples: str
    data: str
    method: str
    rates: Task
    python: tuple[str, str] = ("", "")
    word: str = ""
    named_by: str = ""
    metrics: tuple[str, ...] = ()
    pairs: bool = False
    imitates: bool = False

    @property
    def part(self) -> str:
        """Word of it in the `read_by` of settings: "rl", or the name of its section."""
        return self.section if self.lesson else "rl"

    @property
    def function(self) -> str:
        """Name of its function in Python."""
        return self.command.replace("-", "_")

    def event(self, what: str) -> str:
        """Return the name of one of its events, such as "sft_checkpoint" for "checkpoint"; reinforcement learning has that name itself."""
        return f"{self.section}_{what}" if self.lesson else what
