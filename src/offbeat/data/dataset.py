"""Prompts to train on and to evaluate with: opened from [data], drawn in a resumable order, rendered as tokens.

`open_datasets` is called once at the start; the rollout executor draws from a `PromptStream`; workflows call
`render`. Promises: the same seed gives the same order, a restored stream goes on exactly where it was, and no generated
prompt that is trained on is ever a held-out one.
"""

import re
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from offbeat.config.data import DataConfig
from offbeat.data.identity import add_to_digest, digest_of, new_digest
from offbeat.data.row import Row, parse_record
from offbeat.data.sources import Source, is_file, open_source
from offbeat.data.tasks import Task, find_task
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import DataError, TooLongError

_MOST_REDRAWS = 1000
_DIGESTED_ROWS = 16
"""Of a task, which makes all of its rows in the same way."""

_PROMPT_ID = re.compile(r"(\d+):(\d+)")


class PromptDataset(Protocol):
    """Rows by index."""

    @property
    def num_rows(self) -> int | None:
        """None: there is always another row."""
        ...

    @property
    def digest(self) -> str:
        """Of all rows in their order, and so of what a place in them means; of an endless dataset, of what makes the rows."""
        ...

    def row(self, index: int) -> Row:
        """The row at `index`; IndexError outside of 0 <= index < num_rows."""
        ...


@dataclass(frozen=True, eq=False)
class SourceDataset:
    """Records `start` to `start + num_rows` of a source, whose rows have together the digest `all_rows`."""

    source: Source
    config: DataConfig
    start: int
    num_rows: int
    all_rows: str = ""

    @property
    def digest(self) -> str:
        return digest_of([self.all_rows, self.start, self.num_rows])

    def row(self, index: int) -> Row:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        return parse_record(self.source.record(self.start + index), self.config, where=f"record {self.start + index}")


@dataclass(frozen=True, eq=False)
class ListDataset:
    """Rows in memory."""

    rows: tuple[Row, ...]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def digest(self) -> str:
        return digest_of(self.rows)

    def row(self, index: int) -> Row:
        return self.rows[index]


@dataclass(frozen=True, eq=False)
class EveryNth:
    """Rows `first`, `first` + n, `first` + 2 n, ... of a dataset: the share of one of n processes that draw from it."""

    dataset: PromptDataset
    first: int
    n: int

    @property
    def num_rows(self) -> int | None:
        total = self.dataset.num_rows
        return None if total is None else len(range(self.first, total, self.n))

    @property
    def digest(self) -> str:
        return digest_of([self.dataset.digest, self.first, self.n])

    def row(self, index: int) -> Row:
        return self.dataset.row(self.first + index * self.n)


@dataclass(frozen=True, eq=False)
class TaskDataset:
    """A task's endless rows, less those that are held out."""

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


def open_datasets(config: DataConfig, *, seed: int) -> tuple[PromptDataset, PromptDataset]:
    """Open what [data] describes.

    Returns:
        Rows to train on, and held-out rows (none of them if `data.heldout_size` is 0).

    Raises:
        DataError: nothing is configured, or a source or row cannot be used; every row is checked here.
        MissingExtraError: the source needs an optional dependency.
    """
    if config.task:
        return _open_task(find_task(config), heldout_size=config.heldout_size, seed=seed)
    if not config.path:
        raise DataError("data.task and data.path are both empty; name a built-in task, a .jsonl or .parquet file, or a hub id")
    if config.heldout_split and not config.heldout_path and is_file(config.path):
        raise DataError(f"data.heldout_split is for hub ids, but data.path is the file {config.path!r}; give data.heldout_path")
    source, rows = _open_source(config.path, config, split=config.split)
    if not config.heldout_size:
        return SourceDataset(source, config, 0, len(source), rows), ListDataset(())
    if config.heldout_path or config.heldout_split:
        other, others = _open_source(config.heldout_path or config.path, config, split=config.heldout_split or config.split)
        return (
            SourceDataset(source, config, 0, len(source), rows),
            SourceDataset(other, config, 0, min(config.heldout_size, len(other)), others))
    num_train = len(source) - config.heldout_size
    if num_train < 1:
        raise DataError(
            f"dataset {config.path!r} has {len(source)} rows, which leaves none to train on after data.heldout_size ="
            f" {config.heldout_size}; lower it, or give data.heldout_path")
    return (
        SourceDataset(source, config, 0, num_train, rows), SourceDataset(source, config, num_train, config.heldout_size, rows))


def _open_source(path: str, config: DataConfig, *, split: str) -> tuple[Source, str]:
    """A source, every record of which can be used, and the digest of its rows."""
    state = new_digest()

    def check(record: dict[str, Any], where: str) -> None:
        add_to_digest(state, parse_record(record, config, where=where))

    return open_source(path, split=split, check=check), state.hexdigest()


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
    train.row(0)  # fails now, not in the run, if nothing is left to train on
    return train, ListDataset(tuple(heldout.values()))


def _too_few_prompts(task: Task, heldout_size: int) -> DataError:
    return DataError(
        f"task {task.name!r} has too few different prompts to hold out {heldout_size} and train on others; {task.remedy} or"
        " lower data.heldout_size")


@dataclass(frozen=True)
class StreamState:
    """Where a prompt stream stands.

    Attributes:
        epoch: passes over the dataset finished.
        position: prompts drawn in this epoch.
        returned: ids of prompts drawn and given back, in the order in which they come again.
    """

    epoch: int = 0
    position: int = 0
    returned: tuple[str, ...] = ()


class PromptStream:
    """Draws prompts without end: each epoch visits every row once, in a seeded order; what is given back comes first.

    Resuming loses nothing if the ids drawn and neither trained on nor rejected are given back after `restore`.
    """

    def __init__(self, dataset: PromptDataset, *, seed: int, shuffle: bool = True) -> None:
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self.restore(StreamState())

    def next(self) -> tuple[str, Row]:
        """The next prompt: its id, "epoch:index" with the row's index in the dataset, and its row."""
        if self._returned:
            prompt_id = self._returned.popleft()
            return prompt_id, self.row(prompt_id)
        if self._position == self._dataset.num_rows:
            self._start_epoch(self._epoch + 1, 0)
        index = self._position if self._order is None else int(self._order[self._position])
        self._position += 1
        return f"{self._epoch}:{index}", self._dataset.row(index)

    def row(self, prompt_id: str) -> Row:
        """The row behind a prompt id.

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
            DataError: as `row`.
        """
        self.row(prompt_id)
        assert prompt_id not in self._returned, f"prompt {prompt_id} was given back twice"
        self._returned.append(prompt_id)

    def state(self) -> StreamState:
        """Where the stream stands now."""
        return StreamState(self._epoch, self._position, tuple(self._returned))

    def restore(self, state: StreamState) -> None:
        """Go on from `state`, which a stream over the same dataset and seed had.

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
        for prompt_id in state.returned:
            self.give_back(prompt_id)

    def _start_epoch(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order: np.ndarray | None = None
        # An endless dataset is random as it is, and has no permutation.
        if self._shuffle and self._dataset.num_rows is not None:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._dataset.num_rows)


def render(row: Row, tokenizer: Tokenizer, config: DataConfig) -> list[int]:
    """Token ids of a row's prompt: text, with the BOS token that the tokenizer may put before it, or a chat when the row is one or
    `data.chat_template` is on. A chat's template writes a BOS token where there is to be one.

    Raises:
        ModelError: a chat is needed and the tokenizer cannot make one.
    """
    messages = messages_of(row, config)
    return tokenizer.prompt(str(row.prompt)) if messages is None else tokenizer.chat(messages)


def messages_of(row: Row, config: DataConfig) -> tuple[dict[str, str], ...] | None:
    """A row's prompt as a chat, when it is one or `data.chat_template` is on; None where it is plain text."""
    if isinstance(row.prompt, str) and not config.chat_template:
        return None
    messages = ({"role": "user", "content": row.prompt},) if isinstance(row.prompt, str) else row.prompt
    if config.chat_template and config.system_prompt:
        messages = ({"role": "system", "content": config.system_prompt}, *messages)
    return messages


def check_length(num_tokens: int, config: DataConfig, *, name: str, context: int, max_new_tokens: int) -> None:
    """Refuse a prompt that is empty or leaves no room for its answer.

    Args:
        num_tokens: of the rendered prompt.
        name: the prompt's, for the message.
        context: the model's, in tokens.

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
    if num_tokens > context - max_new_tokens:
        raise TooLongError(
            f"prompt {name} has {num_tokens} tokens, allowed are {max(context - max_new_tokens, 0)} (a context of {context} less"
            f" rollout.max_new_tokens = {max_new_tokens}); lower rollout.max_new_tokens, or remove the rows that are longer than the"
            " data.max_prompt_tokens you want")


def check_lengths(
    dataset: PromptDataset, tokenizer: Tokenizer, config: DataConfig, *, context: int, max_new_tokens: int, max_rows: int = 1000) -> int:
    """Render the first `max_rows` rows and refuse a prompt that is too long, before a run begins.

    Returns:
        Tokens in the longest of them; 0 for an empty dataset.

    Raises:
        DataError: as `check_length`, naming the row.
    """
    longest = 0
    for index in range(max_rows if dataset.num_rows is None else min(max_rows, dataset.num_rows)):
        num_tokens = len(render(dataset.row(index), tokenizer, config))
        check_length(num_tokens, config, name=f"of row {index}", context=context, max_new_tokens=max_new_tokens)
        longest = max(longest, num_tokens)
    return longest


def sft_sequence(row: Row, tokenizer: Tokenizer, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Prompt, solution (or answer) and end token: of a chat the token that ends a turn in its template, else the tokenizer's.

    The two parts are encoded apart, as they are when the answer is generated.

    Returns:
        tokens [L] int32, and loss_mask [L] bool, True on the answer and the end token.
    """
    prompt = render(row, tokenizer, config)
    is_chat = config.chat_template or not isinstance(row.prompt, str)
    end = tokenizer.end_of_turn_id if is_chat and tokenizer.end_of_turn_id is not None else tokenizer.eos_token_id
    answer = [*tokenizer.encode(row.solution or row.answer), end]
    return np.array(prompt + answer, dtype=np.int32), np.repeat([False, True], [len(prompt), len(answer)])
