"""Where a rendering says what messages say."""

import json

import pytest

from offbeat.data.forms import Messages, Tools
from offbeat.data.text_positions import SoughtTexts, find_places
from offbeat.errors import DataError


def places(write, messages: Messages, tools: Tools = ()) -> list[tuple[str, int | None, int | None, bool]]:
    def render(chat: Messages, described: Tools) -> str | None:
        return write(chat, described)

    found = find_places(write(messages, tools), render, messages, tools, sought=SoughtTexts())
    return [(place.kind, place.start, place.end, place.shows) for place in found]


def plain(chat: Messages, described: Tools) -> str:
    return "".join(f"<{message['role']}>{message['content'].strip()}" for message in chat)


def test_equal_texts_have_places_of_their_own() -> None:
    chat = [{"role": "a", "content": "a"}, {"role": "a", "content": " a\n"}, {"role": "b", "content": ""}]
    assert places(plain, chat) == [("content", 3, 4, True), ("content", 7, 8, True)]


def test_calls_and_tools_are_found_in_the_json_that_they_become() -> None:
    chat = [{"role": "a", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"q": 'say "a"', "n": 3}}}]}]
    tools = [{"type": "function", "function": {"name": "f", "description": "Says."}}]

    def write(messages: Messages, described: Tools) -> str:
        return json.dumps(described, ensure_ascii=False) + json.dumps(messages[0]["tool_calls"], ensure_ascii=False)

    found = places(write, chat, tools)
    assert [kind for kind, *_ in found] == ["call", "call", "call", "call", "tool", "tool"] and all(shows for *_, shows in found)


def test_a_text_that_is_left_out_or_cut_does_not_show() -> None:
    def cut(chat: Messages, described: Tools) -> str:
        return "".join(message["content"].split("=")[-1] for message in chat if message["role"] != "b")

    chat = [{"role": "a", "content": "1=2"}, {"role": "b", "content": "1"}, {"role": "a", "content": "3"}]
    assert places(cut, chat) == [("content", None, 1, False), ("content", None, None, False), ("content", 1, 2, True)]


def test_texts_are_marked_one_by_one_where_marks_change_what_is_written() -> None:
    def picky(chat: Messages, described: Tools) -> str:
        return "".join("[named]" if message["content"] == "name" else "?" + message["content"] for message in chat)

    chat = [{"role": "a", "content": "x"}, {"role": "a", "content": "name"}]
    assert places(picky, chat) == [("content", 1, 2, True), ("content", None, None, False)]


def test_a_chat_of_more_texts_than_there_are_marks_is_refused() -> None:
    with pytest.raises(DataError, match="the chat has 30000 texts, allowed are"):
        places(plain, [{"role": "a", "content": "x"}] * 30_000)
