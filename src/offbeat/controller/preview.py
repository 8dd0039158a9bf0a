"""The rows of a run as its model sees them: in tokens, as training reads them, and how many cannot be used. For `offbeat data show`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from offbeat.config.root import Config
from offbeat.config.training_kinds import TrainingKind
from offbeat.controller.inputs import Base, open_mixed, read_base
from offbeat.controller.row_checks import check_of_pairs
from offbeat.controller.template_choice import choose_templates
from offbeat.data.dataset import Dataset
from offbeat.data.image_store import find_pictures
from offbeat.data.pairs import PairEncoder, Preference, open_pairs
from offbeat.data.prompt import check_length, render
from offbeat.data.row import Row
from offbeat.data.supervised import Sequence as Encoded
from offbeat.data.supervised import Supervision
from offbeat.data.tokenizer import Tokenizer
from offbeat.data.unknown_text import unwritable_answers
from offbeat.errors import DataError

_MEASURED = 1000
"""Rows whose tokens are counted."""
_ANY_NUMBER = 2**31


@dataclass(frozen=True)
class Text:
    """A sequence that the model sees.

    Attributes:
        title: name of the sequence in its row, such as "chosen"; empty where there is one.
        pieces: its text in order, each piece with whether its tokens are trained on, such as ("2+2=", False).
    """

    title: str
    pieces: tuple[tuple[str, bool], ...]
    num_tokens: int
    num_trained: int


@dataclass(frozen=True)
class ShownRow:
    """A row, where it comes from, its texts, the answer and columns that rewards are given, and paths of small pictures of its images."""

    where: str
    texts: tuple[Text, ...]
    answer: str = ""
    columns: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preview:
    """The data of a run.

    Attributes:
        rows: the first ones.
        num_rows: rows to train on; None if there is always another one.
        lengths: tokens of the longest text of each of the first rows.
        unusable: why each row that cannot be used is left out.
        allowed: number of unusable rows that a run leaves out; more are an error.
        refused: why each of the first rows whose tokens cannot be used is refused, such as one that is too long.
        unwritable: a sentence on answers for rewards that the model can never write; "" if there are none.
    """

    rows: tuple[ShownRow, ...]
    num_rows: int | None
    num_heldout: int
    lengths: tuple[int, ...]
    unusable: tuple[str, ...]
    allowed: int
    refused: tuple[str, ...]
    unwritable: str = ""


def preview(config: Config, kind: TrainingKind, *, count: int) -> Preview:
    """Read the data of a configuration as training of a kind would, and make tokens of its first rows, of which `count` are shown.

    Raises:
        UserError: model, tokenizer or data cannot be read; rows that cannot be used are told instead.
    """
    config, _ = choose_templates(config)
    base = read_base(config)
    allowed = config.data.max_unusable_rows
    sets = {name: {**table, "max_unusable_rows": _ANY_NUMBER} for name, table in config.data.sets.items()}
    data = config.data.model_copy(update={"sets": sets} if sets else {"max_unusable_rows": _ANY_NUMBER})
    config = config.model_copy(update={"data": data})
    unusable: list[str] = []
    unwritable = ""
    if kind.pairs:
        dataset, heldout = open_pairs(data, unpaired=True, refused=unusable, check=check_of_pairs(base.tokenizer, data))
        show = _pairs(config, base)
    else:
        dataset, heldout = open_mixed(config, base, supervised=kind.imitates, refused=unusable)
        show = _imitated(config, base) if kind.imitates else _prompts(config, base)
        unwritable = unwritable_answers(base.tokenizer, dataset)
    rows, lengths, refused = _read_rows(dataset, show, count=count)
    return Preview(
        tuple(rows), dataset.num_rows, heldout.num_rows or 0, tuple(lengths), tuple(unusable), allowed, tuple(refused), unwritable)


def _read_rows(dataset: Dataset[Any], show: Callable[[Any, str], ShownRow], *, count: int) -> tuple[list[ShownRow], list[int], list[str]]:
    rows, lengths, refused = [], [], []
    for index in range(_MEASURED if dataset.num_rows is None else min(dataset.num_rows, max(_MEASURED, count))):
        try:
            shown = show(dataset.row(index), dataset.where(index))
        except DataError as exc:
            refused.append(str(exc))
            continue
        lengths.append(max(text.num_tokens for text in shown.texts))
        if len(rows) < count:
            rows.append(shown)
    return rows, lengths, refused


def _prompts(config: Config, base: Base) -> Callable[[Row, str], ShownRow]:
    context = min(base.context, config.inference.max_context or base.context)

    def show(row: Row, where: str) -> ShownRow:
        tokens = render(row, base.tokenizer, config.data)
        check_length(len(tokens), config.data, name=f"of {where}", context=context, max_new_tokens=config.rollout.max_new_tokens)
        return ShownRow(where, (_text("", (np.array(tokens, np.int32), np.zeros(len(tokens), bool)), base.tokenizer),), row.answer,
                        tuple(row.extra), _pictures(config, tokens))

    return show


def _imitated(config: Config, base: Base) -> Callable[[Row, str], ShownRow]:
    supervision = Supervision(
        base.tokenizer, config.data, config.sft.model_copy(update={"too_long": "refuse"}), base.context,
        config.train.max_tokens_per_microbatch)

    def show(row: Row, where: str) -> ShownRow:
        sequences = supervision.sequences(row, name=where)
        return ShownRow(where, tuple(_text("", sequence, base.tokenizer) for sequence in sequences), pictures=_pictures(
            config, np.concatenate([tokens for tokens, _ in sequences])))

    return show


def _pairs(config: Config, base: Base) -> Callable[[Preference, str], ShownRow]:
    encoder = PairEncoder(
        base.tokenizer, config.data, "refuse", base.context, config.train.max_tokens_per_microbatch, config.train.share_prefix)

    def show(preference: Preference, where: str) -> ShownRow:
        pair = encoder.encode(preference, name=where)
        assert pair is not None, "what is too long is refused"
        titles = ["chosen" if liked else "rejected" for liked in pair.liked]
        return ShownRow(where, tuple(
            _text(title, sequence, base.tokenizer) for title, sequence in zip(titles, pair.sequences, strict=True)),
            pictures=_pictures(config, pair.sequences[0][0]))

    return show


def _pictures(config: Config, tokens: Sequence[int] | np.ndarray) -> tuple[str, ...]:
    """Return the paths of pictures of the images in tokens [L]."""
    return tuple(map(str, find_pictures(config.run_dir, tokens).values()))


def _text(title: str, sequence: Encoded, tokenizer: Tokenizer) -> Text:
    tokens, mask = sequence
    return Text(title, tuple(_pieces(tokens, mask, tokenizer)), len(tokens), int(mask.sum()))


def _pieces(tokens: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    edges: Sequence[int] = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    for low, high in pairwise(edges):
        if low < high:
            decode = tokenizer.decode_continuation if low else tokenizer.decode
            yield decode(tokens[low:high].tolist(), skip_special_tokens=False), bool(mask[low])
