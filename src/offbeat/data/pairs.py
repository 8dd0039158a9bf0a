"""Preferences: an answer that was chosen and one that was rejected, or single answers with a label. Read from the sources of [data].

`open_pairs` opens the rows of preference training and of reward models, with the readers, the held-out rows and the errors of other data;
a `PairEncoder` makes tokens of them. Layouts are those that TRL reads, and a file may mix them:

    {"prompt": "7+5=", "chosen": "12", "rejected": "13"}
    {"prompt": [messages], "chosen": [the assistant's], "rejected": [the assistant's]}
    {"chosen": [the whole chat], "rejected": [the whole chat]}                          whose common beginning is the prompt
    {"prompt": "7+5=", "completion": "12", "label": true}                               for KTO
    {"input": {"messages": [messages]}, "preferred_output": [messages], "non_preferred_output": [messages]}      as OpenAI has them

The prompt may have images, as in other rows (`data.image_sources`), and answers none. A field `margin`, such as 0.5, says by how much the
chosen answer is better.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from offbeat.config.data import DataConfig
from offbeat.config.template import parse_template
from offbeat.data.chat import mark_answers
from offbeat.data.dataset import Check, Dataset, open_records
from offbeat.data.image_sources import MARK, ImageSource, images_of_column
from offbeat.data.layouts import as_pair, holds_outputs
from offbeat.data.messages import Message, Tool, chat_in, kind_of, parse_messages, same, with_system
from offbeat.data.prompt import check_reads, messages_of, sft_sequence
from offbeat.data.row import Prompt, Row, chat_of, system_of, tools_of, with_images
from offbeat.data.stream import PromptStream
from offbeat.data.supervised import Sequence, draw_kept
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import DataError, ModelError

Answer = str | tuple[Message, ...]
"""Text, or the messages that follow the prompt."""


@dataclass(frozen=True)
class Preference:
    """A prompt and how its answers were judged.

    Attributes:
        answers: the chosen one, then the rejected one; or a single answer.
        liked: whether each answer was chosen, or labelled as good.
        margin: by how much the chosen answer is better; 0 if the record does not say.
    """

    prompt: Prompt
    answers: tuple[Answer, ...]
    liked: tuple[bool, ...]
    margin: float = 0.0
    tools: tuple[Tool, ...] = ()
    images: tuple[ImageSource, ...] = ()

    def row(self, answer: str = "") -> Row:
        return Row(self.prompt, answer, tools=self.tools, images=self.images)


@dataclass(frozen=True, eq=False)
class EncodedPair:
    """A preference in tokens.

    Attributes:
        sequences: each answer with the prompt before it: tokens [L] int32, and loss_mask [L] bool, True on the answer and its end token.
        prefix_len: number of leading tokens that all sequences share and that no mask covers; 0 of a single answer.
    """

    sequences: tuple[Sequence, ...]
    liked: tuple[bool, ...]
    margin: float
    prefix_len: int


def open_pairs(
    config: DataConfig, *, unpaired: bool = False, limit: int | None = None, refused: list[str] | None = None,
    check: Check[Preference] | None = None,
) -> tuple[Dataset[Preference], Dataset[Preference]]:
    """Open the preferences that [data] names, to train on and held-out; with `unpaired`, single answers with a label are allowed.

    Every record is checked here. Other arguments and errors are as of `open_datasets`.
    """
    if config.task:
        raise DataError(
            f"data.task = {config.task!r} makes prompts without preferences; give data.path, a data file or a hub id with"
            " chosen and rejected answers")
    if config.sets:
        raise DataError("data.sets cannot hold preferences; give data.path, a pattern or a folder of files if there are several")
    if not config.path:
        raise DataError("data.path is empty; name a data file or folder, or a hub id, with chosen and rejected answers")

    def parse(record: dict[str, Any], where: str) -> Preference:
        preference = parse_preference(record, config, where=where)
        if len(preference.answers) == 1 and not unpaired:
            raise DataError(
                f"{where}, has one answer with a label, and pairs are needed: fields 'chosen' and 'rejected'; only preference.loss = 'kto'"
                " learns from labels")
        return preference

    return open_records(config, parse, limit=limit, refused=refused, check=check)


def holds_pairs(record: Mapping[str, Any]) -> bool:
    """Whether a record is a preference, by its fields."""
    return {"chosen", "rejected"} <= record.keys() or {"completion", "label"} <= record.keys() or holds_outputs(record)


def parse_preference(record: Mapping[str, Any], config: DataConfig, *, where: str) -> Preference:
    """Make a preference from a JSON object or table row; see the module's layouts. `config.prompt` or `prompt_field` may say otherwise.

    Raises DataError, which names the record by `where`, if a field is missing or of the wrong type, or answers are of different kinds or
    have no assistant's message.
    """
    record = as_pair(record, where)
    column, beside = images_of_column(record, where)
    record = {name: value for name, value in record.items() if name != column}
    present = record.keys()
    if "chosen" in present and "rejected" in present:
        names, liked = ("chosen", "rejected"), (True, False)
    elif "completion" in present and "label" in present and not present & {"chosen", "rejected"}:
        names, liked = ("completion",), (_label(record["label"], where),)
    else:
        raise DataError(
            f"{where}, must have the fields 'chosen' and 'rejected', or 'completion' and 'label'; it has {', '.join(record) or 'none'}")
    within = [list[ImageSource | None]() for _ in names]
    given = [_read_answer(record[name], name, where, images) for name, images in zip(names, within, strict=True)]
    if len({isinstance(answer, str) for answer in given}) > 1:
        raise DataError(f"{where}: 'chosen' and 'rejected' must both be text or both be chats, got one of each")
    prompt_field = config.prompt_field or "prompt"
    asked = parse_template(config.prompt).fill(record, where) if config.prompt else record.get(prompt_field)
    found: list[ImageSource | None] = []
    prompt, answers = _split(record, asked, prompt_field, names, given, where, found)
    if any(within):  # the prompt is in the answers
        found = within[0]
        count = 0 if isinstance(prompt, str) else sum(str(message["content"]).count(MARK) for message in prompt)
        if any(images != found or len(images) != count for images in within):
            raise DataError(
                f"{where}: {_listed(names)} must have the same images, all in the messages with which they begin, which are the prompt")
    if found or beside:
        row = with_images(Row(prompt, ""), found, beside, where)
        prompt, beside = row.prompt, row.images
    if system := system_of(record, config, where):
        prompt = with_system(chat_of(prompt), system)
    tools = tools_of(record, where) if config.wraps or not isinstance(prompt, str) else ()
    return Preference(prompt, answers, liked, _margin(record.get("margin"), where), tools, beside)


@dataclass(frozen=True)
class PairEncoder:
    """Makes tokens of preferences, within the trainer's limits. Nothing is ever cut.

    Attributes:
        too_long: whether a preference that is too long is refused, or dropped.
        context: context length of the model in tokens.
        max_row_tokens: largest number of tokens of one forward pass, which holds both answers of a pair.
        share_prefix: whether a prompt runs once for both answers.
    """

    tokenizer: Tokenizer
    data: DataConfig
    too_long: Literal["refuse", "drop"]
    context: int
    max_row_tokens: int
    share_prefix: bool

    def encode(self, preference: Preference, *, name: str) -> EncodedPair | None:
        """Encode a preference with the tokenizer, and with its chat template if it is a chat or `data.chat_template` is on.

        Returns None if it is too long and is to be dropped. Messages call the row `name`.

        Raises:
            DataError: it is too long, an answer or the prompt has no tokens, or a chat does not fit its template.
            ModelError: a chat is needed and the tokenizer cannot make one of the row.
        """
        sequences = tuple(self._sequence(preference, answer, name) for answer in preference.answers)
        prefix_len = _shared(sequences) if len(sequences) > 1 else 0
        pair = EncodedPair(sequences, preference.liked, preference.margin, prefix_len)
        shared = prefix_len if self.share_prefix else 0
        needed = shared + sum(len(tokens) - 1 - shared for tokens, _ in sequences)  # no pass runs a sequence's last token
        return pair if self.fits(pair, needed, "all of its answers", name=name) else None

    def fits(self, pair: EncodedPair, needed: int, answers: str, *, name: str) -> bool:
        """Whether the context holds each answer, and a pass the `needed` tokens; False drops the pair. Raises DataError to refuse it."""
        longest = max(len(tokens) for tokens, _ in pair.sequences)
        if longest <= self.context and needed <= self.max_row_tokens:
            return True
        if self.too_long == "drop":
            return False
        what = (
            f"has {longest} tokens in its longest answer with the prompt, allowed are {self.context}, the model's context"
            if longest > self.context else
            f"needs a forward pass of {needed} tokens for {answers}, allowed are train.max_tokens_per_microbatch = {self.max_row_tokens}")
        raise DataError(f'{name} {what}; shorten it, or set sft.too_long = "drop"')

    def draw(self, stream: PromptStream[Preference], count: int) -> list[tuple[int, EncodedPair]]:
        """Encode the next `count` rows that are not dropped, each with its index; raises as `encode`, or DataError if far too many are."""

        def encode(row: Preference, name: str) -> list[EncodedPair]:
            pair = self.encode(row, name=name)
            return [] if pair is None else [pair]

        return [(index, pair) for index, [pair] in draw_kept(stream, count, encode, limit="too long")]

    def check(self, dataset: Dataset[Preference]) -> int:
        """Return how many rows will be dropped, encoding all before a run begins; raises as `encode`, or DataError if all would be."""
        count = dataset.num_rows
        assert count is not None, "preferences come from files, which have an end"
        num_dropped = sum(self.encode(dataset.row(index), name=dataset.where(index)) is None for index in range(count))
        if count and num_dropped == count:
            raise DataError(
                f'all {count} rows are too long, so sft.too_long = "drop" leaves none; raise train.max_tokens_per_microbatch, or shorten'
                " them")
        return num_dropped

    def _sequence(self, preference: Preference, answer: Answer, name: str) -> Sequence:
        text = answer if isinstance(answer, str) else ""
        row = preference.row(text)
        check_reads(row, self.tokenizer)
        messages = messages_of(row, self.data)
        if messages is None:
            tokens, mask = sft_sequence(row, self.tokenizer, self.data)
        else:
            said = ({"role": "assistant", "content": text},) if isinstance(answer, str) else answer
            tokens, mask = self._chat(messages, said, preference, name)
        self.tokenizer.check_rows(tokens)
        if mask[0]:
            raise DataError(f"the prompt of {name} has no tokens; a prompt needs at least one")
        if mask.sum() < 2:
            raise DataError(f"an answer of {name} has no tokens; there is nothing to prefer or reject")
        return tokens, mask

    def _chat(self, prompt: tuple[Message, ...], answer: tuple[Message, ...], preference: Preference, name: str) -> Sequence:
        """Encode an answer after messages that are the prompt of `preference`, perhaps after a system prompt."""
        try:
            texts = mark_answers((*prompt, *answer), self.tokenizer, turns="all", first=max(len(prompt), 1), tools=preference.tools)
        except (DataError, ModelError) as exc:
            raise type(exc)(f"{name} cannot be encoded: {exc}") from exc
        if len(texts) > 1:
            raise DataError(
                f"{name} has an answer of several messages, and the chat template writes earlier ones differently once others follow;"
                " give answers of one message")
        tokens, mask = texts[0].sequence(self.tokenizer)
        if self.tokenizer.images is None:
            return tokens, mask
        whole, origins = self.tokenizer.images.expand(tokens, preference.images, where=name)
        return whole, mask[origins]


def _split(
    record: Mapping[str, Any], prompt: Any, prompt_field: str, names: tuple[str, ...], given: list[Answer], where: str,
    images: list[ImageSource | None],
) -> tuple[Prompt, tuple[Answer, ...]]:
    """Return the prompt, whose images are appended to `images` if it has a field of its own, and the answers without it."""
    chats = [answer for answer in given if not isinstance(answer, str)]
    # Chats that begin with another's message are whole: their prompt is in them, even if the record has a prompt field.
    if chats and (prompt is None or any(chat[0]["role"] != "assistant" for chat in chats)):
        most = min(len(chat) for chat in chats) - 1
        # The common beginning of a single chat is all but its last message.
        shared = takewhile(lambda messages: all(same(m, messages[0]) for m in messages), zip(*chats, strict=False))
        count = min(most, sum(1 for _ in shared))
        if not count:
            raise DataError(
                f"{where}: {_listed(names)} must begin with the same messages, which are the prompt, or there must be a field"
                f" {prompt_field!r}; they differ from the first on")
        split: Prompt = chats[0][:count]
        answers: tuple[Answer, ...] = tuple(chat[count:] for chat in chats)
    else:
        if prompt is None:
            raise DataError(f"{where}, has no field {prompt_field!r}; it has {', '.join(record)}; set data.prompt_field")
        is_text = isinstance(prompt, str) and chat_in(prompt, prompt_field, where) is None
        split = prompt if is_text else parse_messages(prompt, prompt_field, where, images=images)
        split = chat_of(split) if chats else split
        answers = tuple(given)
    for name, answer in zip(names, answers, strict=True):
        if not isinstance(answer, str) and answer[-1]["role"] != "assistant":
            raise DataError(f"{where}: {name!r} must end with the assistant's message, got one of {answer[-1]['role']!r}")
    return split, answers


def _read_answer(value: Any, name: str, where: str, images: list[ImageSource | None]) -> Answer:
    """Return an answer, or a chat with its prompt, whose images are appended to `images`."""
    if isinstance(value, str) and chat_in(value, name, where) is None:
        return value
    if isinstance(value, str | list):
        return parse_messages(value, name, where, images=images)
    raise DataError(f"{where}: field {name!r} must be text or a list of messages, got {kind_of(value)}")


def _label(value: Any, where: str) -> bool:
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise DataError(f"{where}: field 'label' must be true or false, got {str(value)[:40]!r}")


def _margin(value: Any, where: str) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where}: field 'margin' must be a finite number, got {str(value)[:40]!r}")
    return float(value)


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(repr(name) for name in names)


def _shared(sequences: tuple[Sequence, ...]) -> int:
    """Return the length of the sequences' common prompt; 0 if their prompts differ."""
    lengths = {int(np.argmax(mask)) for _, mask in sequences}
    length = lengths.pop()
    first, _ = sequences[0]
    return length if not lengths and all(np.array_equal(tokens[:length], first[:length]) for tokens, _ in sequences) else 0
