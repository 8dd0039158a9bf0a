"""Messages of chats as data sets have them."""

import pytest

from offbeat.data.messages import parse_messages, parse_tools, text_of, with_system
from offbeat.errors import DataError

USER = {"role": "user", "content": "u"}


def test_keys_that_hold_nothing_are_left_out_and_others_kept():
    table_row = {"role": "user", "content": "u", "tool_calls": None, "name": None, "tool_call_id": None, "weight": 1}
    thought = {"role": "assistant", "content": "a", "reasoning_content": "because", "name": "me"}
    assert parse_messages([table_row, thought], "messages", "here") == (
        USER, {"role": "assistant", "content": "a", "reasoning_content": "because"})


def test_a_call_without_arguments_or_with_text_for_them_is_one_of_a_template():
    calls = [{"function": {"name": "f", "arguments": "[1]"}, "id": "7"}, {"name": "g", "arguments": {"a": None, "b": 1}}, {"name": "h"}]
    [message] = parse_messages([{"role": "assistant", "content": None, "tool_calls": calls}], "messages", "here")
    assert message["tool_calls"] == [
        {"function": {"name": "f", "arguments": [1]}, "id": "7"}, {"name": "g", "arguments": {"b": 1}}, {"name": "h"}]
    assert message["content"] == "" and text_of(message).startswith('[{"function"')


@pytest.mark.parametrize("messages", ["text", [], [3], [{"role": "user"}], [{"content": "c"}], [{"from": "human"}],
                                      [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "assistant", "content": None}]])
def test_what_is_no_chat_is_refused_with_its_place(messages):
    with pytest.raises(DataError, match="^here: "):
        parse_messages(messages, "messages", "here")


def test_tools_are_a_list_of_objects_or_its_json():
    assert parse_tools(None, "tools", "here") == parse_tools("", "tools", "here") == parse_tools([], "tools", "here") == ()
    assert parse_tools('[{"name": "f", "x": null}]', "tools", "here") == ({"name": "f"},)
    for wrong in ("{", "3", {"name": "f"}, ["f"]):
        with pytest.raises(DataError, match="here: field 'tools' must be a list of tools"):
            parse_tools(wrong, "tools", "here")


def test_a_chat_has_one_system_message():
    own = ({"role": "system", "content": "own"}, USER)
    assert with_system(own, "other") == own
    assert with_system((USER,), "other") == ({"role": "system", "content": "other"}, USER)
    assert with_system((USER,), "") == (USER,)
