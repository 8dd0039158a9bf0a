"""Prompts to train on and to evaluate with: opened from [data], drawn in a resumable order, rendered as tokens.

`open_datasets` is called once at the start; the rollout executor draws from a `PromptStream`; workflows call `render`. Other kinds of rows
are opened by `open_records` and drawn by the same stream. Promises: the same seed gives the same order, a restored stream continues exactly
where it was, and no generated prompt that is trained on is ever a held-out one.
"""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from offbeat.config.curriculum import CurriculumConfig
from offbeat.config.data import DataConfig
from offbeat.data.curriculum import Curriculum, CurriculumState
from offbeat.data.files import Sieve, Source
from offbeat.data.identity import add_to_digest, digest_of, new_digest
from offbeat.data.messages import Message, with_system
from offbeat.data.row import Row, parse_record
from offbeat.data.sources import has_splits, open_source
from offbeat.data.tasks import Task, find_task
from offbeat.data.tokenizer import Tokenizer
from offbeat.data.trajectory import Group
from offbeat.errors import DataError, TooLongError
from offbeat.telemetry.tracker import StatsPart

_MOST_REDRAWS = 1000
_DIGESTED_ROWS = 16
"""Number of rows that stand for a task in its digest, since a task makes all of its rows in the same way."""

_PROMPT_ID = re.compile(r"(\d+):(\d+)")

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Parse = Callable[[dict[str, Any], str], R]
"""Makes a row of a record; the second argument names the record in messages. Raises DataError if the record cannot be used."""


class Dataset(Protocol[R_co]):
    """A dataset of rows that are read by index."""

    @property
    def num_rows(self) -> int | None:
        """Number of rows; None if there is always another one."""
        ...

    @property
    def digest(self) -> str:
        """Digest of all rows in order, and so of what an index means; for an endless dataset, of what generates the rows."""
        ...

    def row(self, index: int) -> R_co:
        """Return the row at `index`; raises IndexError outside of 0 <= index < num_rows."""
        ...

    def where(self, index: int) -> str:
        """Name the row at `index` in messages, by its place in a file if it comes from one."""
        ...


PromptDataset = Dataset[Row]
"""A dataset of prompts with their answers."""


@dataclass(frozen=True, eq=False)
class SourceDataset(Generic[R]):
    """Records `start` to `start + num_rows` of a source; `all_rows` is the digest of all rows of the source."""

    source: Source
    parse: Parse[R]
    start: int
    num_rows: int
    all_rows: str = ""

    @property
    def digest(self) -> str:
        return digest_of([self.all_rows, self.start, self.num_rows])

    def row(self, index: int) -> R:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        return self.parse(self.source.record(self.start + index), self.where(index))

    def where(self, index: int) -> str:
        """See `Dataset.where`."""
        return self.source.where(self.start + index)


@dataclass(frozen=True, eq=False)
class ListDataset(Generic[R]):
    """A dataset of rows held in memory."""

    rows: tuple[R, ...]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def digest(self) -> str:
        return digest_of(self.rows)

    def row(self, index: int) -> R:
        return self.rows[index]

    def where(self, index: int) -> str:
        """See `Dataset.where`."""
        return f"row {index}"


@dataclass(frozen=True, eq=False)
class EveryNth(Generic[R]):
    """Rows `first`, `first` + n, `first` + 2 n, ... of a dataset: the share of one of n processes that draw from it."""

    dataset: Dataset[R]
    first: int
    n: int

    @property
    def num_rows(self) -> int | None:
        total = self.dataset.num_rows
        return None if total is None else len(range(self.first, total, self.n))

    @property
    def digest(self) -> str:
        return digest_of([self.dataset.digest, self.first, self.n])

    def row(self, index: int) -> R:
        return self.dataset.row(self.first + index * self.n)

    def where(self, index: int) -> str:
        """See `Dataset.where`."""
        return self.dataset.where(self.first + index * self.n)


@dataclass(frozen=True, eq=False)
class TaskDataset:
    """A task's endless rows, without the held-out ones."""

    task: Task
    seed: int
    heldout: frozenset[str]

    num_rows = None

    @property
    def digest(self) -> str:
        return digest_of([self.task.name, self.seed, *sorted(self.heldout), *(self.row(index) for index in range(_DIGESTED_ROWS))])

    def row(self, index: int) -> Row:
        for attempt in range(_MOST_REDRAWS):
            row = self.task.row(index, seed=self.seed, stream=f"train.{attempt}")
            if row.prompt not in self.heldout:
                return row
        raise _too_few_prompts(self.task, len(self.heldout))

    def where(self, index: int) -> str:
        """See `Dataset.where`."""
        return f"row {index}"


def open_datasets(
    config: DataConfig, *, seed: int, needs_answer: bool = True, limit: int | None = None, refused: list[str] | None = None,
) -> tuple[PromptDataset, PromptDataset]:
    """Open what [data] describes.

    Args:
        needs_answer: whether a row without an answer cannot be used.
        limit: number of rows of each file or dataset after which the rest is not looked at; None for all.
        refused: why each row that cannot be used is left out is appended to this list.

    Returns:
        Rows to train on, and held-out rows (empty if `data.heldout_size` is 0).

    Raises:
        DataError: nothing is configured, a source cannot be used, or more rows cannot than `data.max_unusable_rows`; every row is checked
            here.
        MissingExtraError: the source needs an optional dependency.
    """
    if config.task:
        return _open_task(find_task(config), heldout_size=config.heldout_size, seed=seed)
    if not config.path:
        raise DataError("data.task and data.path are both empty; name a built-in task, a data file or folder, or a hub id")
    return open_records(
        config, lambda record, where: parse_record(record, config, where=where, needs_answer=needs_answer), limit=limit, refused=refused)


def open_records(
    config: DataConfig, parse: Parse[R], *, limit: int | None = None, refused: list[str] | None = None,
) -> tuple[Dataset[R], Dataset[R]]:
    """Open the files or hub dataset that `config.path` and `heldout_*` name, with rows that `parse` makes.

    Args:
        limit, refused: as in `open_datasets`.

    Returns:
        Rows to train on, and held-out rows (empty if `data.heldout_size` is 0).

    Raises:
        DataError: a source cannot be used, or `parse` refuses more records than `data.max_unusable_rows`; every record is checked here.
        MissingExtraError: the source needs an optional dependency.
    """
    refused = [] if refused is None else refused

    def opened(path: str, split: str) -> tuple[Source, str]:
        state = new_digest()
        sieve = Sieve(lambda record, where: add_to_digest(state, parse(record, where)), config.max_unusable_rows, limit)
        source = open_source(path, split=split, sieve=sieve)
        refused.extend(sieve.refused)
        return source, state.hexdigest()

    if config.heldout_split and not config.heldout_path and not has_splits(config.path):
        raise DataError(
            f"data.heldout_split is for hub ids and folders, but data.path is the file {config.path!r}; give data.heldout_path")
    source, rows = opened(config.path, config.split)
    if not config.heldout_size:
        return SourceDataset(source, parse, 0, len(source), rows), ListDataset(())
    if config.heldout_path or config.heldout_split:
        other, others = opened(config.heldout_path or config.path, config.heldout_split or config.split)
        return (
            SourceDataset(source, parse, 0, len(source), rows),
            SourceDataset(other, parse, 0, min(config.heldout_size, len(other)), others))
    num_train = len(source) - config.heldout_size
    if num_train < 1 and limit is not None and len(source) + len(refused) >= limit:  # the others have not been looked at
        return SourceDataset(source, parse, 0, len(source), rows), ListDataset(())
    if num_train < 1:
        raise DataError(
            f"dataset {config.path!r} has {len(source)} rows, which leaves none to train on after data.heldout_size ="
            f" {config.heldout_size}; lower it, or give data.heldout_path")
    return (
        SourceDataset(source, parse, 0, num_train, rows), SourceDataset(source, parse, num_train, config.heldout_size, rows))


def _open_task(task: Task, *, heldout_size: int, seed: int) -> tuple[TaskDataset, ListDataset]:
    heldout: dict[str, Row] = {}
    index = repeats = 0
    while len(heldout) < heldout_size:
        row = task.row(index, seed=seed, stream="heldout")
        index, repeats = index + 1, repeats + 1 if row.prompt in heldout else 0
        heldout.setdefault(str(row.prompt), row)
        if repeats == _MOST_REDRAWS:
            raise _too_few_prompts(task, heldout_size)
    train = TaskDataset(task, seed, frozenset(heldout))
    train.row(0)  # fail now, not in the run, if nothing is left to train on
    return train, ListDataset(tuple(heldout.values()))


def _too_few_prompts(task: Task, heldout_size: int) -> DataError:
    return DataError(
        f"task {task.name!r} has too few different prompts to hold out {heldout_size} and train on others; {task.remedy} or"
        " lower data.heldout_size")


@dataclass(frozen=True)
class StreamState:
    """Position of a prompt stream.

    Attributes:
        epoch: number of passes over the dataset completed.
        position: number of prompts drawn in this epoch, or passed over by the curriculum.
        returned: ids of prompts drawn and given back, in the order in which they are drawn again.
        curriculum: how prompts went; None without a curriculum.
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
        """Tell the curriculum, if there is one, how the group of a drawn prompt went: when it is trained on, or rejected for good."""
        if self._curriculum is not None:
            self._curriculum.note(int(group.prompt_id.partition(":")[2]), group.rewards)

    def stats(self) -> StatsPart:
        """Return the curriculum's statistics; none without one."""
        return StatsPart() if self._curriculum is None else self._curriculum.stats()

    def row(self, prompt_id: str) -> R:
        """Return the row of a prompt id.

        Raises:
            DataError: the id is malformed or past the end of the dataset.
        """
        match = _PROMPT_ID.fullmatch(prompt_id)
        num_rows = self._dataset.num_rows
        if match is None or (num_rows is not None and int(match[2]) >= num_rows):
            known = "endless" if num_rows is None else f"of {num_rows} rows"
            raise DataError(f"prompt id must be 'epoch:index' within a dataset {known}, got {prompt_id!r}; was the dataset changed?")
        return self._dataset.row(int(match[2]))

    def give_back(self, prompt_id: str) -> None:
        """Put a drawn prompt in front of all that were not drawn yet, behind those given back before it.

        Raises:
            DataError: as for `row`.
        """
        self.row(prompt_id)
        assert prompt_id not in self._returned, f"prompt {prompt_id} was given back twice"
        self._returned.append(prompt_id)

    def state(self) -> StreamState:
        """Return the current position of the stream."""
        curriculum = None if self._curriculum is None else self._curriculum.state()
        return StreamState(self._epoch, self._position, tuple(self._returned), curriculum)

    def restore(self, state: StreamState) -> None:
        """Continue from `state`, which was taken from a stream over the same dataset and seed.

        Raises:
            DataError: the dataset is shorter than it was.
        """
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


def render(row: Row, tokenizer: Tokenizer, config: DataConfig) -> list[int]:
    """Return the token ids of a row's prompt.

    The prompt is rendered as text, after the tokenizer's BOS token if it adds one, or as a chat, with the row's tools, if the row is one or
    `data.chat_template` is on. In a chat, the template writes the BOS token where there is to be one.

    Raises:
        ModelError: a chat is needed and the tokenizer has no template for it.
    """
    messages = messages_of(row, config)
    return tokenizer.prompt(str(row.prompt)) if messages is None else tokenizer.giving(row.template_kwargs).chat(messages, tools=row.tools)


def messages_of(row: Row, config: DataConfig) -> tuple[Message, ...] | None:
    """Return a row's prompt as a chat if it is one or `data.chat_template` is on; None where it is plain text.

    `data.system_prompt` comes before a chat that has no system message of its own.
    """
    if isinstance(row.prompt, str) and not config.chat_template:
        return None
    messages = ({"role": "user", "content": row.prompt},) if isinstance(row.prompt, str) else row.prompt
    return with_system(messages, config.system_prompt)


def check_length(num_tokens: int, config: DataConfig, *, name: str, context: int, max_new_tokens: int) -> None:
    """Refuse a prompt that is empty or leaves no room for its answer.

    Args:
        num_tokens: length of the rendered prompt.
        name: name of the prompt, for the message.
        context: context length of the model in tokens.

    Raises:
        DataError: `num_tokens` is 0.
        TooLongError: it is above `data.max_prompt_tokens` if that is set, or above context - max_new_tokens.
    """
    if not num_tokens:
        raise DataError(f"prompt {name} has no tokens; a prompt needs at least one")
    if 0 < config.max_prompt_tokens < num_tokens:
        raise TooLongError(
            f"prompt {name} has {num_tokens} tokens, allowed are data.max_prompt_tokens = {config.max_prompt_tokens};"
            " raise it, or remove the row")
    if max_new_tokens >= context:
        raise TooLongError(
            f"rollout.max_new_tokens = {max_new_tokens} leaves no room for prompt {name} of {num_tokens} tokens in a context of {context};"
            " lower it to what an answer needs")
    if num_tokens > context - max_new_tokens:
        raise TooLongError(
            f"prompt {name} has {num_tokens} tokens, allowed are {context - max_new_tokens} (a context of {context} less"
            f" rollout.max_new_tokens = {max_new_tokens}); lower rollout.max_new_tokens, raise inference.max_context where it is set, or"
            " remove rows that are so long")


def check_lengths(
    dataset: PromptDataset, tokenizer: Tokenizer, config: DataConfig, *, context: int, max_new_tokens: int, max_rows: int = 1000) -> int:
    """Render the first `max_rows` rows and refuse a prompt that is too long, before a run begins.

    Returns:
        Number of tokens in the longest of them; 0 for an empty dataset.

    Raises:
        DataError: as for `check_length`; the message names the row.
    """
    longest = 0
    for index in range(max_rows if dataset.num_rows is None else min(max_rows, dataset.num_rows)):
        num_tokens = len(render(dataset.row(index), tokenizer, config))
        check_length(num_tokens, config, name=f"of {dataset.where(index)}", context=context, max_new_tokens=max_new_tokens)
        longest = max(longest, num_tokens)
    return longest


def sft_sequence(row: Row, tokenizer: Tokenizer, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Encode prompt, solution (or answer) and end token, which is the chat template's end of turn for a chat, else the tokenizer's.

    The two parts are encoded separately, as they are when the answer is generated.

    Returns:
        tokens [L] int32, and loss_mask [L] bool, True on the answer and the end token.
    """
    prompt = render(row, tokenizer, config)
    is_chat = config.chat_template or not isinstance(row.prompt, str)
    end = tokenizer.end_of_turn_id if is_chat and tokenizer.end_of_turn_id is not None else tokenizer.eos_token_id
    answer = [*tokenizer.encode(row.solution or row.answer), end]
    return np.array(prompt + answer, dtype=np.int32), np.repeat([False, True], [len(prompt), len(answer)])
