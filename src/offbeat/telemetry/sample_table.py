"""A table of samples, which sinks show beside the metrics. The loop gives a function that makes it; a sink calls it on its own thread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

TAG = "samples"
"""Name of the tables in the tools of other projects."""

COLUMNS = ("reward", "prompt", "completion", "answer", "ended by", "tokens", "row")

Cell = str | int | float | None


@dataclass(frozen=True)
class SampleTable:
    """Samples that a step was given to train on, those with the largest reward first.

    Attributes:
        rows: values of `COLUMNS`: the reward, None if there is none; three texts; how the sample ended; the number of generated tokens; and
            the prompt's "epoch:index", such as "0:17".
    """

    rows: Sequence[tuple[Cell, ...]]


MakeTable = Callable[[], SampleTable]
