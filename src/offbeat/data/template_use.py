"""Advice on chat templates: one that is not used, and one that does not write all parts of chats.

Given once, by `offbeat config check` and at the start of a run.
"""

import re
from collections.abc import Iterator, Sequence

from offbeat.config.data import DataConfig
from offbeat.data.dataset import Dataset
from offbeat.data.forms import uses_tools
from offbeat.data.messages import Message
from offbeat.data.pairs import Preference
from offbeat.data.prompt import messages_of
from offbeat.data.row import Prompt, Row
from offbeat.data.thoughts import CLOSED, OPENED
from offbeat.data.tokenizer import Tokenizer

_TAUGHT = re.compile(r"(?<![a-z])(instruct|chat|it)(?![a-z])", re.IGNORECASE)
"""Parts of the names of models that were taught chats, such as Qwen2.5-7B-Instruct and gemma-3-1b-it."""

_LOOKED_AT = 100
_TOOLS = "tools, calls and results, which are given as text in Hermes' format"
_SYSTEM = "system messages, which are put before the user's first message"
_THOUGHTS = "the thoughts of answers, which are written in <think> tags before the answers that are trained on"


def unused_template(tokenizer: Tokenizer, prompt: Prompt, data: DataConfig, *, model: str) -> str:
    """Return advice if prompts are plain text although the model was taught chats; "" where they are chats, or for other models.

    The prompt is the first row's, and `model` is `model.path`: empty for the tiny model, which was taught nothing.
    """
    if not model or data.wraps or not isinstance(prompt, str) or tokenizer.special_text_in(prompt):
        return ""
    if tokenizer.has_chat_template:
        return (
            f"prompts are plain text, and the tokenizer of {model} has a chat template: a model that was taught chats answers plain text"
            " worse, and may not end its answers; set data.chat_template = true, unless it is a base model")
    if _TAUGHT.search(model.rstrip("/").rpartition("/")[2]):
        return (
            f"prompts are plain text, and {model} is named like a model that was taught chats, but its tokenizer has no chat template; put"
            " its chat_template.jinja beside tokenizer.json and set data.chat_template = true, unless it is a base model")
    return ""


def replaced_forms(tokenizer: Tokenizer, rows: Dataset[Row] | Dataset[Preference], data: DataConfig, *, imitated: bool) -> str:
    """Return advice on the parts of the first rows that the chat template does not write, and their replacement; "" if it writes all.

    Answers are looked at where they are `imitated`, as those of preferences always are.
    """
    if not tokenizer.has_chat_template:
        return ""
    count = _LOOKED_AT if rows.num_rows is None else min(rows.num_rows, _LOOKED_AT)
    found = dict.fromkeys(form for index in range(count) for form in _replaced(rows.row(index), tokenizer, data, imitated=imitated))
    if not found:
        return ""
    return (
        f"the chat template of tokenizer {tokenizer.name!r} does not write {'; '.join(found)}; set data.chat_template to a template that"
        " does, unless the model is to learn this form")


def _replaced(row: Row | Preference, tokenizer: Tokenizer, data: DataConfig, *, imitated: bool) -> Iterator[str]:
    asked = messages_of(Row(row.prompt, ""), data)
    if asked is None:
        return
    if isinstance(row, Row):
        tokenizer = tokenizer.giving(row.template_kwargs)
    answers = _answers(row, imitated=imitated)
    form = tokenizer.form(with_tools=bool(row.tools))
    if not form.writes_calls and uses_tools([*asked, *answers], row.tools):
        yield _TOOLS
    if form.folds_system and asked[0]["role"] == "system":
        yield _SYSTEM
    if not form.reasoning and any(message.get("reasoning_content") for message in answers):
        prompt = tokenizer.chat_text(asked, tools=row.tools)
        if not OPENED.search(prompt) and not CLOSED.search(prompt):
            yield _THOUGHTS


def _answers(row: Row | Preference, *, imitated: bool) -> Sequence[Message]:
    if isinstance(row, Row):
        return [row.imitated] if imitated else []
    return [message for answer in row.answers if not isinstance(answer, str) for message in answer]
