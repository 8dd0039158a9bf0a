"""Rows drawn from a dataset in a resumable order, each with an id such as "0:17", which finds it again.

The rollout executor draws prompts from a `PromptStream`, supervised and preference training their rows. Promises: the same seed gives the
same order, and a restored stream continues exactly where it was.
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from offbeat.config.curriculum import CurriculumConfig
from offbeat.data.curriculum import Curriculum, CurriculumState
from offbeat.data.dataset import Dataset
from offbeat.data.trajectory import Group
from offbeat.errors import DataError
from offbeat.telemetry.tracker import StatsPart

_PROMPT_ID = re.compile(r"(\d+):(\d+)")

R = TypeVar("R")


@dataclass(frozen=True)
class StreamState:
    """Position of a prompt stream.

    Attributes:
        epoch: number of passes over the dataset completed.
        position: number of prompts drawn in this epoch, or passed over by the curriculum.
        returned: ids of prompts drawn and given back, such as ("0:17",), in the order in which they are drawn again.
        curriculum: results of the prompts; None without a curriculum.
    """

    epoch: int = 0
    position: int = 0
    returned: tuple[str, ...] = ()
    curriculum: CurriculumState | None = None


class PromptStream(Generic[R]):
    """Draws rows without end: each epoch visits every row once, in a seeded order; those that were given back come first.

    A curriculum passes over some of the rows that an epoch visits. Resuming loses nothing if the ids drawn and neither trained on nor
    rejected are given back after `restore`.
    """

    def __init__(self, dataset: Dataset[R], *, seed: int, shuffle: bool = True, curriculum: CurriculumConfig | None = None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._curriculum: Curriculum | None = None
        if curriculum is not None and curriculum.is_on:
            assert dataset.num_rows is not None, "a curriculum needs rows that come again"  # `Config` refuses generated ones
            self._curriculum = Curriculum(curriculum, num_rows=dataset.num_rows, seed=seed)
        self.restore(StreamState())

    def next(self) -> tuple[str, R]:
        """Draw the next row: its id, "epoch:index" with the row's index in the dataset, and the row."""
        if self._returned:
            prompt_id = self._returned.popleft()
            return prompt_id, self.row(prompt_id)
        while True:
            if self._position == self._dataset.num_rows:
                self._start_epoch(self._epoch + 1, 0)
            index = self._position if self._order is None else int(self._order[self._position])
            self._position += 1
            if self._curriculum is None or self._curriculum.draws(index):
                return f"{self._epoch}:{index}", self._dataset.row(index)

    def note(self, group: Group) -> None:
        """Give the curriculum, if there is one, the rewards of a drawn prompt's group, once it is trained on or rejected for good."""
        if self._curriculum is not None:
            self._curriculum.note(int(group.prompt_id.partition(":")[2]), group.rewards)

    def stats(self) -> StatsPart:
        """Return the curriculum's statistics; none without one."""
        return StatsPart() if self._curriculum is None else self._curriculum.stats()

    def row(self, prompt_id: str) -> R:
        """Return the row of a prompt id; raises DataError if the id is malformed or past the end of the dataset."""
        match = _PROMPT_ID.fullmatch(prompt_id)
        num_rows = self._dataset.num_rows
        if match is None or (num_rows is not None and int(match[2]) >= num_rows):
            known = "endless" if num_rows is None else f"of {num_rows} rows"
            raise DataError(f"prompt id must be 'epoch:index' within a dataset {known}, got {prompt_id!r}; was the dataset changed?")
        return self._dataset.row(int(match[2]))

    @property
    def position(self) -> tuple[int, int]:
        """Number of passes completed, and prompts drawn or passed over in this one."""
        return self._epoch, self._position

    def go_on(self, *, epoch: int, position: int, results: Iterable[tuple[int, str, Sequence[float]]]) -> None:
        """Go on to a later position, as an earlier process has done.

        `results` are rewards that the curriculum has heard of on the way: the epoch then, the prompt's id and its rewards.
        """
        for then, prompt_id, rewards in results:
            if then > self._epoch:
                self._start_epoch(then, 0)
            if self._curriculum is not None:
                self._curriculum.note(int(prompt_id.partition(":")[2]), np.array(rewards, np.float32))
        if epoch > self._epoch:
            self._start_epoch(epoch, 0)
        self._position = position

    def give_back(self, prompt_id: str) -> None:
        """Put a drawn prompt in front of all that were not drawn yet, behind those given back before it. Raises as `row`."""
        self.row(prompt_id)
        assert prompt_id not in self._returned, f"prompt {prompt_id} was given back twice"
        self._returned.append(prompt_id)

    def state(self) -> StreamState:
        curriculum = None if self._curriculum is None else self._curriculum.state()
        return StreamState(self._epoch, self._position, tuple(self._returned), curriculum)

    def restore(self, state: StreamState) -> None:
        """Continue from `state`, taken from a stream over the same dataset and seed; raises DataError if the dataset has become shorter."""
        num_rows = self._dataset.num_rows
        if num_rows is not None and state.position > num_rows:
            raise DataError(
                f"the saved run had drawn {state.position} prompts of this epoch, but the dataset has {num_rows} rows;"
                " resume with the same dataset, or start a new run")
        self._returned: deque[str] = deque()
        self._start_epoch(state.epoch, state.position)
        if self._curriculum is not None:
            self._curriculum.restore(state.curriculum or CurriculumState())
        for prompt_id in state.returned:
            self.give_back(prompt_id)

    def _start_epoch(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        if self._curriculum is not None:
            self._curriculum.start_epoch(epoch)
        self._order: np.ndarray | None = None
        # An endless dataset is random already, and has no permutation.
        if self._shuffle and self._dataset.num_rows is not None:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._dataset.num_rows)
