"""Rows as supervised sequences, within the trainer's limits. Opened with the data; checked at the start, drawn from in each step.

A sequence is never cut: one that is too long is refused, or its row dropped, by `sft.too_long`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from offbeat.config.data import DataConfig
from offbeat.config.train import SftConfig
from offbeat.data.chat import MarkedText, mark_answers
from offbeat.data.dataset import PromptDataset
from offbeat.data.prompt import check_reads, messages_of, sft_sequence
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import DataError, ModelError

Sequence = tuple[np.ndarray, np.ndarray]
"""Tokens [L] int32 and loss_mask [L] bool; the mask is False on the first token, and the last token is trained on."""

R = TypeVar("R")
T = TypeVar("T")
_CHECKED_OF_ENDLESS = 1000
_MOST_DROPPED = 100_000
_MOST_ADDED = 4
"""Tokens that stand for no byte of the text: at its start and at its end."""


@dataclass(frozen=True)
class Supervision:
    """Makes sequences of rows, of at most `context` tokens; all but the last go through a forward pass, at most `max_row_tokens`."""

    tokenizer: Tokenizer
    data: DataConfig
    sft: SftConfig
    context: int
    max_row_tokens: int

    def sequences(self, row: Row, *, name: str) -> list[Sequence]:
        """Return the sequences of a row, which messages call `name`, such as "row 7"; none if it is too long and to be dropped.

        Raises:
            DataError: it is too long, it has nothing to imitate, or a chat does not fit its template.
            ModelError: a chat is needed and the tokenizer cannot make one of the row.
        """
        chat = self._chat(row, name)
        sequences = [sft_sequence(row, self.tokenizer, self.data)] if chat is None else self._encoded(row, chat, name)
        for tokens, mask in sequences:
            self.tokenizer.check_rows(tokens)
            if mask[0]:
                raise DataError(f"the prompt of {name} has no tokens; a prompt needs at least one")
            if mask.sum() < 2:
                raise DataError(f"the answer of {name} has no tokens; there is nothing to imitate")
        length = max(len(tokens) for tokens, _ in sequences)
        if length <= self._max_tokens:
            return sequences
        if self.sft.too_long == "drop":
            return []
        limit = (
            f"{self.context}, the model's context" if self.context <= self.max_row_tokens else
            f"{self.max_row_tokens + 1}, one more than train.max_tokens_per_microbatch")
        raise DataError(f'{name} has {length} tokens with its answer, allowed are {limit}; shorten it, or set sft.too_long = "drop"')

    def draw(self, stream: PromptStream, count: int) -> list[Sequence]:
        """Return the sequences of the next `count` rows that are not dropped. Raises as `sequences`, or where far too many are dropped."""
        kept = draw_kept(stream, count, lambda row, name: self.sequences(row, name=name), limit=f"longer than {self._max_tokens} tokens")
        return [sequence for _, sequences in kept for sequence in sequences]

    def check(self, dataset: PromptDataset) -> int:
        """Look at every row before a run begins, of an endless dataset at the first thousand; returns how many will be dropped.

        Raises as `sequences`, and DataError if every row would be dropped.
        """
        count = _CHECKED_OF_ENDLESS if dataset.num_rows is None else dataset.num_rows
        num_dropped = sum(not self._is_used(dataset.row(index), name=dataset.where(index)) for index in range(count))
        if count and num_dropped == count:
            raise DataError(
                f"all {count} rows are longer than {self._max_tokens} tokens, so sft.too_long = \"drop\" leaves"
                " none to train on; raise train.max_tokens_per_microbatch, or shorten them")
        return num_dropped

    @property
    def _max_tokens(self) -> int:
        """Longest sequence in tokens; nothing is predicted from its last one, so it may have one more than a row."""
        return min(self.context, self.max_row_tokens + 1)

    def _encoded(self, row: Row, chat: list[MarkedText], name: str) -> list[Sequence]:
        """Return the sequences of the texts of a chat, with its images in their places."""
        sequences = [text.sequence(self.tokenizer) for text in chat]
        if (images := self.tokenizer.images) is None:
            return sequences
        expanded = []
        for number, (tokens, mask) in enumerate(sequences, start=1):
            count = len(row.images) if number == len(sequences) else int((tokens == images.token_id).sum())
            whole, origins = images.expand(tokens, row.images[:count], where=name)
            expanded.append((whole, mask[origins]))
        return expanded

    def _chat(self, row: Row, name: str) -> list[MarkedText] | None:
        """The texts of a row that is a chat, else None."""
        check_reads(row, self.tokenizer)
        messages = messages_of(row, self.data)
        if messages is None:
            return None
        try:
            tokenizer = self.tokenizer.giving(row.template_kwargs)
            return mark_answers((*messages, row.imitated), tokenizer, turns=self.sft.assistant_turns, tools=row.tools)
        except (DataError, ModelError) as exc:
            raise type(exc)(f"{name} cannot be imitated: {exc}") from exc

    def _is_used(self, row: Row, *, name: str) -> bool:
        """Whether `sequences` gives any. Encoding takes long, so it is skipped for a text of few bytes, which cannot have many tokens."""
        chat = self._chat(row, name)
        answer = row.solution or row.answer
        texts = [text.text for text in chat] if chat is not None else [f"{row.prompt}{answer}"] if row.prompt and answer else []
        is_short = not row.images and texts and all(len(text.encode()) + _MOST_ADDED <= self._max_tokens for text in texts)
        return bool(is_short or self.sequences(row, name=name))


def draw_kept(stream: PromptStream[R], count: int, encode: Callable[[R, str], list[T]], *, limit: str) -> list[tuple[int, list[T]]]:
    """Draw rows until `count` of them are not dropped; returns the index in the dataset of each, and its sequences from `encode`.

    Raises DataError if far too many are dropped.

    Args:
        encode: returns the sequences of a row, or none for one that is too long and dropped; its second argument names the row.
        limit: description of dropped rows for the message, e.g. "longer than 4096 tokens".
    """
    kept: list[tuple[int, list[T]]] = []
    num_dropped = 0
    while len(kept) < count:
        prompt_id, row = stream.next()
        index = int(prompt_id.partition(":")[2])
        if encoded := encode(row, f"row {index}"):
            kept.append((index, encoded))
            num_dropped = 0
            continue
        num_dropped += 1
        if num_dropped == _MOST_DROPPED:
            raise DataError(
                f'{num_dropped} rows in a row are {limit} and dropped, as sft.too_long = "drop" says;'
                " shorten them, or raise train.max_tokens_per_microbatch")
    return kept
