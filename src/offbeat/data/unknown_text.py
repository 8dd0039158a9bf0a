"""Refuses rows with text that the tokenizer does not know: the model would see an unknown token there, and never write it.

`dataset` and `pairs` get these checks when they open data, and count such rows among the unusable ones. A tokenizer over bytes knows every
text, so its rows are not checked. An answer that only a reward reads gives a warning, and is not refused.
"""

import string
from collections.abc import Callable, Iterable, Iterator

from offbeat.config.data import DataConfig
from offbeat.data.dataset import PromptDataset
from offbeat.data.image_sources import MARK
from offbeat.data.messages import Message, text_of
from offbeat.data.pairs import Preference
from offbeat.data.prompt import messages_of
from offbeat.data.row import Prompt, Row
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import DataError

_MOST_SHOWN = 20
_LOOKED_AT = 100
_CHARACTERS = {" ": "space", "\n": "line break"}
_WHOLE = {string.digits: "digits", string.ascii_lowercase: "lower-case letters", string.ascii_uppercase: "capital letters"}


def check_row(tokenizer: Tokenizer, config: DataConfig, *, answered: bool) -> Callable[[Row, str], None] | None:
    """Return a check that refuses a row whose prompt has text unknown to the tokenizer; None where all text is known.

    It takes a row and its name, and raises DataError. Where rows are `answered`, answers must be known, too, because they are imitated or
    compared with the model's.
    """
    if tokenizer.knows_all:
        return None

    def check(row: Row, where: str) -> None:
        texts = ((part, text.replace(MARK, "") if row.images else text) for part, text in _prompt(row.prompt, config))
        answers = [row.answer, *_said(row.imitated)] if answered else []
        _check_texts(tokenizer, [*texts, *(("answer", text) for text in answers)], where)

    return check


def check_preference(tokenizer: Tokenizer, config: DataConfig) -> Callable[[Preference, str], None] | None:
    """Return a check that refuses a preference with text unknown to the tokenizer; as `check_row`."""
    if tokenizer.knows_all:
        return None

    def check(preference: Preference, where: str) -> None:
        answers = ([answer] if isinstance(answer, str) else map(text_of, answer) for answer in preference.answers)
        asked = ((part, text.replace(MARK, "") if preference.images else text) for part, text in _prompt(preference.prompt, config))
        _check_texts(tokenizer, [*asked, *(("answers", text) for said in answers for text in said)], where)

    return check


def unwritable_answers(tokenizer: Tokenizer, rows: PromptDataset) -> str:
    """Return a sentence with the number of the first rows whose answer the model can never write; "" if none, or if that is unknown.

    No reason to refuse them: a user's reward may use an answer for something else than a comparison.
    """
    if tokenizer.unknown_id is None:
        return ""
    count = _LOOKED_AT if rows.num_rows is None else min(rows.num_rows, _LOOKED_AT)
    found = [(index, unknown) for index in range(count) if (unknown := tokenizer.unknown_in(rows.row(index).answer))]
    if not found:
        return ""
    index, unknown = found[0]
    return (
        f"{len(found)} of the first {count} rows have an answer that the model can never write; a reward that compares with it is never"
        f" earned. The first is {rows.where(index)}: {unknown[:_MOST_SHOWN]!r} {_why(tokenizer, unknown)}")


def describe_alphabet(alphabet: str) -> str:
    """Name the characters of an alphabet, such as "digits, lower-case letters, space, and + - *"."""
    names, rest = [], alphabet
    for whole, name in _WHOLE.items():
        if all(character in rest for character in whole):
            names.append(name)
            rest = "".join(character for character in rest if character not in whole)
    names += [name for character, name in _CHARACTERS.items() if character in rest]
    signs = " ".join(character for character in rest if character not in _CHARACTERS)
    return ", ".join(names) + (f"{', and ' if names else ''}{signs}" if signs else "")


def _prompt(prompt: Prompt, config: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield the texts of a prompt, each after its kind, such as "system message". The chat template's own text does not count."""
    messages = messages_of(Row(prompt, ""), config)
    if messages is None:
        yield "prompt", str(prompt)
        return
    yield from (("system message" if message["role"] == "system" else "prompt", text) for message in messages for text in _said(message))


def _said(message: Message) -> Iterator[str]:
    yield text_of(message)
    if thoughts := message.get("reasoning_content"):
        yield thoughts


def _check_texts(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]], where: str) -> None:
    for part, text in texts:
        if unknown := tokenizer.unknown_in(text):
            raise DataError(f"{where}: {unknown[:_MOST_SHOWN]!r} in its {part} {_why(tokenizer, unknown)}")


def _why(tokenizer: Tokenizer, unknown: str) -> str:
    alphabet = tokenizer.alphabet
    if tokenizer.num_rows is not None and unknown in tokenizer.hf.get_vocab():
        return (
            f"is a token that the tokenizer {tokenizer.name!r} knows, but the model's embedding of {tokenizer.num_rows} rows does not;"
            " leave it out, or use a model that has it (model.path)")
    if not alphabet:
        return (
            f"is unknown to the tokenizer {tokenizer.name!r}, which reads {tokenizer.hf.unk_token} in its place; leave it out, or use a"
            " model whose tokenizer knows it (model.path)")
    remedy = "use lower case" if unknown.lower() in alphabet else "leave it out"
    return (f"is not in the alphabet of the tiny model: {describe_alphabet(alphabet)}; {remedy}, or use a pretrained model (model.path)")
