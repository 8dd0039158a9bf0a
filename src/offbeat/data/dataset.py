"""Rows to train on and to evaluate with, opened from [data].

`open_datasets` is called once at the start, for prompts; other kinds of rows are opened by `open_records`. A `stream.PromptStream` draws
from a dataset. An index means the same row as long as the digest is the same, and no generated prompt that is trained on is held out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from offbeat.config.data import DataConfig
from offbeat.data.files import Sieve, Source, name_of
from offbeat.data.identity import add_to_digest, digest_of, new_digest
from offbeat.data.row import Row, parse_record
from offbeat.data.sources import has_splits, open_source
from offbeat.data.tasks import Task, find_task
from offbeat.errors import DataError

_MOST_REDRAWS = 1000
_DIGESTED_ROWS = 16
"""Number of a task's rows that its digest covers, since a task makes all of its rows in the same way."""

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Parse = Callable[[dict[str, Any], str], R]
"""Makes a row of a record; the second argument names the record in messages. Raises DataError if the record cannot be used."""
Check = Callable[[R, str], None]
"""Looks at a row; the second argument names it in messages. Raises DataError if the row cannot be used."""


class Dataset(Protocol[R_co]):
    """A dataset of rows that are read by index."""

    @property
    def num_rows(self) -> int | None:
        """Number of rows; None if there is always another one."""
        ...

    @property
    def digest(self) -> str:
        """Digest of all rows in order; of an endless dataset, of its generator."""
        ...

    def row(self, index: int) -> R_co:
        """Return the row at `index`; raises IndexError outside of 0 <= index < num_rows."""
        ...

    def where(self, index: int) -> str:
        """Name the row at `index` in messages, by its place in a file if it comes from one, e.g. "'train.jsonl', line 3"."""
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
        return f"row {index}"


def open_datasets(
    config: DataConfig, *, seed: int, needs_answer: bool = True, limit: int | None = None, refused: list[str] | None = None,
    check: Check[Row] | None = None,
) -> tuple[PromptDataset, PromptDataset]:
    """Open the datasets of [data].

    Args:
        needs_answer: whether a row without an answer cannot be used.
        limit: number of rows to look at in each file or dataset; None for all.
        refused: the reasons for rows that cannot be used are appended to this list.
        check: refuses further rows, by raising DataError; of a task, the held-out rows and the first others are checked.

    Returns:
        Rows to train on, and held-out rows (empty if `data.heldout_size` is 0).

    Raises:
        DataError: nothing is configured, a source cannot be used, or more rows cannot than `data.max_unusable_rows`; every row is checked.
        MissingExtraError: the source needs an optional dependency.
    """
    if config.task:
        drawn = _open_task(find_task(config), heldout_size=config.num_heldout(None), seed=seed)
        if check is not None:
            for rows in drawn:
                for index in range(_DIGESTED_ROWS if rows.num_rows is None else rows.num_rows):
                    check(rows.row(index), rows.where(index))
        return drawn
    if not config.path:
        raise DataError("data.task and data.path are both empty; name a built-in task, a data file or folder, or a hub id")
    return open_records(
        config, lambda record, where: parse_record(record, config, where=where, needs_answer=needs_answer), limit=limit, refused=refused,
        check=check)


def open_records(
    config: DataConfig, parse: Parse[R], *, limit: int | None = None, refused: list[str] | None = None, check: Check[R] | None = None,
) -> tuple[Dataset[R], Dataset[R]]:
    """Open the files or hub dataset that `config.path` and `heldout_*` name, with rows that `parse` makes.

    Records that `parse` refuses count like those that `check` does. Other arguments, results and errors are as of `open_datasets`.
    """
    refused = [] if refused is None else refused

    def opened(path: str, split: str) -> tuple[Source, str]:
        state = new_digest()

        def add(record: dict[str, Any], where: str) -> None:
            row = parse(record, where)
            if check is not None:
                check(row, where)
            add_to_digest(state, row)

        sieve = Sieve(add, config.max_unusable_rows, limit)
        source = open_source(path, split=split, sieve=sieve)
        refused.extend(sieve.refused)
        return source, state.hexdigest()

    if config.heldout_split and not config.heldout_path and not has_splits(config.path):
        raise DataError(f"data.heldout_split is for hub ids and folders, but data.path is the file {config.path!r}; give data.heldout_path")
    source, rows = opened(config.path, config.split)
    whole = SourceDataset(source, parse, 0, len(source), rows)
    if not config.heldout_size:
        return whole, ListDataset(())
    if config.heldout_path or config.heldout_split:
        other, others = opened(config.heldout_path or config.path, config.heldout_split or config.split)
        return whole, SourceDataset(other, parse, 0, min(config.num_heldout(None), len(other)), others)
    num_heldout = config.num_heldout(len(source))
    num_train = len(source) - num_heldout
    if num_train < 1 and limit is not None and len(source) + len(refused) >= limit:  # the others have not been looked at
        return whole, ListDataset(())
    if num_train < 1:
        raise DataError(
            f"dataset {name_of(config.path)} has {len(source)} rows, which leaves none to train on after data.heldout_size ="
            f" {num_heldout}; lower it, or give data.heldout_path")
    return replace(whole, num_rows=num_train), replace(whole, start=num_train, num_rows=num_heldout)


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
