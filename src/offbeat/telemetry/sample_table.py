"""A table of samples, which sinks show beside the metrics. The loop says how it is made; a sink has it made on its own thread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

TAG = "samples"
"""What the tables are called in the tools of other projects."""

COLUMNS = ("reward", "prompt", "completion", "answer", "ended by", "tokens", "row")

Cell = str | int | float | None


@dataclass(frozen=True)
class SampleTable:
    """Samples that a step was given to train on, those with the largest reward first.

    Attributes:
        rows: values of `COLUMNS`: the reward, None if there is none; three texts; how the sample ended; the number of tokens that the
            policy wrote; and the prompt's "epoch:index".
    """

    rows: Sequence[tuple[Cell, ...]]


MakeTable = Callable[[], SampleTable]
