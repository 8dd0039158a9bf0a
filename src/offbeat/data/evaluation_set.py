"""Rows of an evaluation set: the run's held-out rows, or others that the set names. Called by `controller.inputs`."""

from offbeat.config.data import DataConfig
from offbeat.data.dataset import Check, ListDataset, PromptDataset, open_datasets
from offbeat.data.row import Row
from offbeat.errors import DataError

_SOURCE = ("task", "task_size", "task_options", "path", "split", "sets")
"""Settings that choose the rows."""
_FIELDS = ("format", "prompt", "prompt_field", "answer_field", "system_field", "max_unusable_rows")
"""Settings that turn a record into a row."""


def has_own_rows(config: DataConfig, *, of_run: DataConfig) -> bool:
    """Whether an evaluation set names other rows than the run's; all of them may be asked then."""
    return any(getattr(config, name) != getattr(of_run, name) for name in _SOURCE)


def open_set(
    config: DataConfig, *, of_run: DataConfig, heldout: PromptDataset, most: int, seed: int, needs_answer: bool = True,
    refused: list[str] | None = None, check: Check[Row] | None = None,
) -> PromptDataset:
    """Open the rows of an evaluation set: at most `most`, from the beginning.

    They are the run's own held-out rows if `config` names the run's rows. Otherwise, all rows of a file or split may be asked, and rows of
    a task are drawn like held-out ones. `of_run` and `heldout` are [data] of the run, and its held-out rows; other arguments and errors are
    as of `open_datasets`. Raises DataError also if the rows are the run's, and it holds none out.
    """
    if has_own_rows(config, of_run=of_run):
        alone = config.model_copy(update={"heldout_size": most if config.task else 0})
        train, heldout = open_datasets(alone, seed=seed, needs_answer=needs_answer, refused=refused, check=check)
        rows = heldout if config.task else train
    elif config.heldout_size:
        same = all(getattr(config, name) == getattr(of_run, name) for name in _FIELDS)
        rows = heldout if same else open_datasets(config, seed=seed, needs_answer=needs_answer, refused=refused, check=check)[1]
    else:
        raise DataError(
            "data.heldout_size is 0, and these are the rows to train on, so there is nothing to evaluate on; give data.path, data.split or"
            " data.task of the set's own, or set data.heldout_size")
    assert rows.num_rows is not None, "rows are held out, or in a file"
    return ListDataset(tuple(rows.row(index) for index in range(min(most, rows.num_rows))))
