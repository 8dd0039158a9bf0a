"""A row of a dataset: a prompt, its answer, and other fields for rewards. Also parses raw records into rows.

Rows cross to reward processes, so they are frozen and plain. Every error about a record says where it is and which fields it has.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offbeat.config.data import DataConfig
from offbeat.errors import DataError

Prompt = str | tuple[dict[str, str], ...]

_DEFAULT_FIELDS = {"prompt_answer": ("prompt", "answer"), "gsm8k": ("question", "answer"), "messages": ("messages", "answer")}
_GSM8K_ANSWER = re.compile(r"####\s*(\S[^\n]*)")


@dataclass(frozen=True)
class Row:
    """One prompt with its answer.

    Attributes:
        prompt: text, or a chat of messages with `role` and `content`.
        answer: what a reward compares with.
        extra: the record's other fields as text; values that are not text are written as JSON.
        solution: what supervised fine-tuning imitates, where that is more than the answer (GSM8K's worked solution, or the assistant's
            last message in a chat that has a separate answer); else empty.
    """

    prompt: Prompt
    answer: str
    extra: dict[str, str] = field(default_factory=dict)
    solution: str = ""


def parse_record(record: Mapping[str, Any], config: DataConfig, *, where: str) -> Row:
    """Make a row from a JSON object or table row, according to `config.format` and the field names.

    Args:
        where: names the record in messages, such as `'train.jsonl', line 3`.

    Raises:
        DataError: a field is missing or of the wrong type, GSM8K's answer has no `####`, or a chat has no answer.
    """
    default_prompt, default_answer = _DEFAULT_FIELDS[config.format]
    prompt_field, answer_field = config.prompt_field or default_prompt, config.answer_field or default_answer
    if config.format == "messages" and prompt_field in record:
        return _chat(record, prompt_field, answer_field, where)
    for name, setting in ((prompt_field, "data.prompt_field"), (answer_field, "data.answer_field")):
        if name not in record:
            raise DataError(f"{where}, has no field {name!r}; it has {', '.join(record) or 'none'}; set {setting} or data.format")
    answer = _text(record[answer_field], answer_field, where)
    solution = ""
    if config.format == "gsm8k":
        solution, answer = answer, _gsm8k_answer(answer, where)
    prompt = record[prompt_field]
    if not isinstance(prompt, str):
        raise DataError(f"{where}: field {prompt_field!r} must be text, got {kind_of(prompt)}; a chat needs data.format = \"messages\"")
    return Row(prompt, answer, _extra(record, prompt_field, answer_field), solution)


def _chat(record: Mapping[str, Any], prompt_field: str, answer_field: str, where: str) -> Row:
    """Make a row whose prompt ends where the assistant is to answer. A last message by the assistant is the answer or solution."""
    messages = parse_messages(record[prompt_field], prompt_field, where)
    extra = _extra(record, prompt_field, answer_field)
    given = record.get(answer_field)
    if messages[-1]["role"] != "assistant":
        if given is None:
            raise DataError(
                f"{where}, has no answer: the chat in {prompt_field!r} does not end with the assistant's message, and there is no field"
                f" {answer_field!r}; add one of them, or set data.answer_field")
        return Row(messages, _text(given, answer_field, where), extra)
    prompt, said = messages[:-1], messages[-1]["content"]
    if not prompt:
        raise DataError(f"{where}: the chat in {prompt_field!r} has nothing before the assistant's message; it needs a user's first")
    return Row(prompt, said, extra) if given is None else Row(prompt, _text(given, answer_field, where), extra, solution=said)


def _extra(record: Mapping[str, Any], *used: str) -> dict[str, str]:
    return {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in record.items() if k not in used}


def _text(value: Any, name: str, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{where}: field {name!r} must be text or a number, got {kind_of(value)}")


def _gsm8k_answer(text: str, where: str) -> str:
    found = _GSM8K_ANSWER.findall(text)
    if not found:
        raise DataError(
            f"{where}: a GSM8K answer must end in '#### ' and a number, got {text[-40:]!r};"
            ' for bare answers use data.format = "prompt_answer"')
    return found[-1].strip().replace(",", "")


def parse_messages(value: Any, name: str, where: str) -> tuple[dict[str, str], ...]:
    """Return a chat from the field `name` of a record; raises DataError, which names the record `where`, if it is none."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: field {name!r} must be a list of messages, got {kind_of(value)}")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            got = json.dumps(message, default=str)[:80]
            raise DataError(f"{where}: each message in {name!r} must have text in 'role' and 'content', got {got}")
        if message.get("tool_calls"):
            raise DataError(f"{where}: a message in {name!r} has tool_calls, which are not supported; write the call as text in 'content'")
    return tuple({"role": m["role"], "content": m["content"]} for m in value)


def kind_of(value: Any) -> str:
    """Return what a value of the wrong kind is called in messages."""
    return "null" if value is None else "an empty list" if value == [] else type(value).__name__
