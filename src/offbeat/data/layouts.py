"""Converts records in the layouts of published data sets to the columns of `row` and `pairs`. Called by both; a test has one of each.

Only records without those columns are changed, and a record keeps all of its columns but those that are read here.
"""

import json
from collections.abc import Mapping
from typing import Any

from offbeat.data.chat_keys import holds_message
from offbeat.data.messages import kind_of
from offbeat.errors import DataError

_READ = frozenset({"prompt", "messages", "conversations"})
_PREFERRED, _NOT_PREFERRED = "preferred_output", "non_preferred_output"


def as_chat(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a record with `messages` in the place of `conversation` or `query`; others as they are.

    `conversation` is a list of messages, or of turns such as {"input": "2+2=", "output": "4"} (Capybara). `query` beside `answers` and
    `tools` is a question, and calls as JSON (xLAM), which stay in `answers` for rewards. Raises DataError for turns without text, or a
    `query` that is none.
    """
    if _READ & record.keys():
        return record
    turns = record.get("conversation")
    if isinstance(turns, list) and turns and all(isinstance(turn, Mapping) for turn in turns):
        if all(map(holds_message, turns)):
            return _with(record, "conversation", turns)
        if any("input" in turn or "output" in turn for turn in turns):
            return _with(record, "conversation", [message for turn in turns for message in _of_turn(turn, turn is turns[-1], where)])
    if {"query", "answers", "tools"} <= record.keys():
        if not isinstance(record["query"], str):
            raise DataError(f"{where}: field 'query' must be text, got {kind_of(record['query'])}")
        calls = record["answers"] if isinstance(record["answers"], str) else json.dumps(record["answers"], ensure_ascii=False)
        said = [] if calls.strip() in ("", "[]", "null") else [{"role": "tool_calls", "content": calls}]
        return _with(record, "query", [{"role": "user", "content": record["query"]}, *said])
    return record


def holds_outputs(record: Mapping[str, Any]) -> bool:
    """Whether a record is a preference in the form of OpenAI's fine-tuning."""
    return {"input", _PREFERRED, _NOT_PREFERRED} <= record.keys()


def as_pair(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a record in the form of OpenAI's fine-tuning with `prompt`, `tools`, `chosen` and `rejected`; others as they are.

    Raises DataError if `input` holds no messages, or keys that are not read.
    """
    if not holds_outputs(record):
        return record
    asked = record["input"]
    if not isinstance(asked, Mapping) or "messages" not in asked:
        raise DataError(f"{where}: field 'input' must be an object with 'messages', got {kind_of(asked)}")
    if unread := sorted(key for key, value in asked.items() if value and key not in ("messages", "tools", "parallel_tool_calls")):
        raise DataError(f"{where}: field 'input' has {unread[0]!r}, which is not read; leave it out")
    others = {name: value for name, value in record.items() if name not in ("input", _PREFERRED, _NOT_PREFERRED)}
    tools = {"tools": asked["tools"]} if asked.get("tools") else {}
    return {**others, **tools, "prompt": asked["messages"], "chosen": record[_PREFERRED], "rejected": record[_NOT_PREFERRED]}


def _with(record: Mapping[str, Any], replaced: str, messages: list[Any]) -> dict[str, Any]:
    return {**{name: value for name, value in record.items() if name != replaced}, "messages": messages}


def _of_turn(turn: Mapping[str, Any], is_last: bool, where: str) -> list[dict[str, str]]:
    """Return the messages of a turn; the last one may have no output yet."""
    asked, said = turn.get("input"), turn.get("output")
    if not isinstance(asked, str) or not (isinstance(said, str) or (is_last and said is None)):
        raise DataError(
            f"{where}: each turn in 'conversation' must have text in 'input' and 'output', got {json.dumps(turn, default=str)[:80]}")
    return [{"role": "user", "content": asked}, *([] if said is None else [{"role": "assistant", "content": said}])]
