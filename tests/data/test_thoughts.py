"""Thoughts in text: found, split off, closed and written."""

import pytest

from offbeat.data.thoughts import CLOSED, OPENED, close_thought, skip_empty, split_thought, write_thought


@pytest.mark.parametrize(("content", "asked", "parts"), [
    ("<think>\ntwo\n</think>\n\n4", "", ("two", "4")),
    ("<think></think>4", "", ("", "4")),
    ("[THINK]two[/THINK]4", "", ("two", "4")),
    ("two</think>4", "<think>\n", ("two", "4")),
    ("two</think>4", "", ("", "two</think>4")),
    ("<think>never closed", "", ("", "<think>never closed")),
    ("4 <think>later</think>", "", ("", "4 <think>later</think>")),
])
def test_thoughts_are_split_off_where_a_text_begins_with_them(content: str, asked: str, parts: tuple[str, str]) -> None:
    assert split_thought(content, asked) == parts


@pytest.mark.parametrize(("prompt", "is_opened", "is_closed"), [
    ("<a>", False, False), ("<a><think>\n", True, False), ("<a><think>\n\n</think>\n\n", False, True), ("<a></think>", False, True),
    ("<a><think> x", False, False), ("<|channel>thought\n<channel|>", False, True), ("<|START_THINKING|>", True, False),
])
def test_a_prompt_opens_a_thought_or_closes_one(prompt: str, is_opened: bool, is_closed: bool) -> None:
    assert (OPENED.search(prompt) is not None, CLOSED.search(prompt) is not None) == (is_opened, is_closed)


def test_a_thought_is_closed_with_its_own_tag_and_an_empty_one_as_templates_write_it() -> None:
    assert "<think>\n" + close_thought("<think>\n", "") == "<think>\n\n</think>\n\n"
    assert "<think>\n" + close_thought("<think>\n", "two") == "<think>" + close_thought("<think>", "two") == write_thought("two")
    assert close_thought("[THINK]", "two") == "\ntwo\n[/THINK]\n\n"


def test_an_empty_thought_is_skipped_up_to_a_place() -> None:
    assert skip_empty("<think>\n\n</think>\n\n4", 0, 19) == 19
    assert skip_empty("</think>4", 0, 8) == 8
    assert skip_empty("<think>\n\n</think>\n\n4", 0, 10) == skip_empty("4", 0, 1) == skip_empty("<think>x</think>", 0, 16) == 0
