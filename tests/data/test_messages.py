"""Messages of chats as data sets have them."""

import json

import pytest

from offbeat.data.messages import chat_in, for_template, is_learnt, parse_messages, parse_tools, text_of, with_system, without_filled_nulls
from offbeat.errors import DataError

USER = {"role": "user", "content": "u"}


def read(*messages, name="messages"):
    return parse_messages(list(messages), name, "here")


def test_keys_that_hold_nothing_are_left_out_and_others_kept():
    table_row = {"role": "user", "content": "u", "tool_calls": None, "name": None, "tool_call_id": "", "weight": 0, "lang": "de"}
    thought = {"role": "assistant", "content": "a", "reasoning_content": "because", "name": "me"}
    assert read(table_row, thought) == (
        {**USER, "lang": "de"}, {"role": "assistant", "content": "a", "reasoning_content": "because", "name": "me"})


def test_arguments_of_calls_stay_in_the_form_that_they_have():
    calls = [{"function": {"name": "f", "arguments": "[1]"}, "id": "7"}, {"name": "g", "arguments": {"a": None, "b": 1}}, {"name": "h"},
             {"name": "k", "arguments": ""}]
    [message] = read({"role": "assistant", "content": None, "tool_calls": calls})
    assert message["tool_calls"] == [
        {"function": {"name": "f", "arguments": "[1]"}, "id": "7"}, {"name": "g", "arguments": {"a": None, "b": 1}}, {"name": "h"},
        {"name": "k", "arguments": "{}"}]
    assert message["content"] == ""
    assert text_of(message).startswith('[{"function": {"name": "f", "arguments": [1]}, "id": "7"}, {"name": "g"')
    written = for_template(message, arguments_as_text=True)["tool_calls"]
    assert [call.get("arguments") for call in written[1:]] == ['{"a": null, "b": 1}', None, "{}"]


@pytest.mark.parametrize(("role", "read_as"), [
    ("User", "user"), ("human", "user"), ("prompter", "user"), ("model", "assistant"), ("bot", "assistant"), ("AI", "assistant"),
    ("gpt", "assistant"), ("developer", "system"), ("function", "tool"), ("observation", "tool"), ("Function Response", "tool"),
    ("critic", "critic")])
def test_roles_of_other_trainers_are_read_as_those_of_templates(role, read_as):
    [message] = read({"role": role, "content": "c"})
    assert message == {"role": read_as, "content": "c"}


def test_a_role_that_is_in_no_table_is_refused_in_the_older_layout_whose_roles_templates_do_not_know():
    with pytest.raises(DataError, match="here: a message in 'messages' is from 'narrator', which is none of the known roles"):
        read({"from": "narrator", "value": "c"})


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_have_one_name_and_templates_get_all_of_them(key):
    [message] = read({"role": "assistant", "content": "a", key: "because"})
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "because"}
    assert for_template(message, arguments_as_text=False) == {
        "role": "assistant", "content": "a", "reasoning_content": "because", "reasoning": "because", "thinking": "because"}


def test_thoughts_may_be_parts_of_the_content():
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "be"}]}, {"type": "thinking", "thinking": "cause"},
             {"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}]
    assert read({"role": "assistant", "content": parts}) == (
        {"role": "assistant", "content": "ab", "reasoning_content": "because"},)


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"loss": 0}])
def test_a_message_of_the_assistant_that_is_marked_as_context_is_not_learnt(mark):
    [one, other] = read({"role": "assistant", "content": "a", **mark}, {"role": "assistant", "content": "b", **dict.fromkeys(mark, 1)})
    assert (is_learnt(one), is_learnt(other)) == (False, True)
    assert for_template(one, arguments_as_text=False) == {"role": "assistant", "content": "a"}


def test_calls_of_older_layouts_are_calls_of_the_assistant():
    call = {"name": "f", "arguments": '{"a": 1}'}
    made = {"type": "function", "function": call}
    older = read({"role": "assistant", "content": None, "function_call": call}, {"role": "function", "name": "f", "content": "3"})
    assert older == ({"role": "assistant", "content": "", "tool_calls": [made]}, {"role": "tool", "content": "3", "name": "f"})
    texts = read(
        {"from": "gpt", "value": "Let me see."}, {"from": "function_call", "value": json.dumps(call)},
        {"from": "function_call", "value": json.dumps([call, call])}, {"from": "observation", "value": "3"})
    assert texts == (
        {"role": "assistant", "content": "Let me see.", "tool_calls": [made, made, made]}, {"role": "tool", "content": "3"})


def test_a_chat_may_be_json_text():
    assert parse_messages(json.dumps([USER]), "messages", "here") == (USER,)
    assert chat_in("[1, 2]", "prompt", "here") is None and chat_in('[{"x": 1}]', "prompt", "here") is None
    with pytest.raises(DataError, match="here: field 'prompt' holds a chat as Python prints it, which is not JSON"):
        chat_in(str([USER]), "prompt", "here")


@pytest.mark.parametrize(("message", "sentence"), [
    ({"role": "assistant", "content": "a", "weight": 0.5}, "'weight' of a message in 'messages' must be 0, 1, false or true, got '0.5'"),
    ({**USER, "train": True}, "'train' of a message of 'user' in 'messages' is true, but only the assistant's are trained on"),
    ({"role": "assistant", "content": "a", "weight": 1, "train": False}, "'weight' and 'train' of a message in 'messages' contradict"),
    ({"role": "assistant", "content": "a", "train_detail": [{"begin_offset": 0}]}, "'train_detail', which is not read; a message is"),
    ({"role": "assistant", "content": None, "refusal": "No."}, "must have text in 'role' and 'content'"),
    ({"role": "assistant", "content": "", "refusal": "No."}, "'refusal', which is not read; put what the assistant says into 'content'"),
    ({"role": "assistant", "content": "a", "reasoning": "x", "thinking": "y"}, "different thoughts in 'reasoning' and 'thinking'"),
    ({"role": "assistant", "content": "a", "reasoning": ["x", 3]}, "'reasoning' of a message in 'messages' must be text, got list"),
    ({**USER, "thinking": "hm"}, "a message of 'user' in 'messages' has thoughts, which only the assistant has"),
    ({**USER, "tool_calls": [{"name": "f"}]}, "a message of 'user' in 'messages' has calls, which only the assistant has"),
    ({"role": "assistant", "channel": "analysis", "content": "hm"}, "'channel', which is not read; give what stands in the channel"),
    ({**USER, "from": "gpt"}, "has both 'role' and 'from', and they differ"),
    ({"role": "assistant", "content": "", "tool_calls": [{"name": "f"}], "function_call": {"name": "f"}}, "both 'tool_calls' and"),
    ({"role": "assistant", "content": "", "function_call": "f"}, "function_call of a message in 'messages' must be an object, got str"),
    ({"from": "function_call", "value": "f()"}, "a message of calls in 'messages' must hold JSON with a 'name' and 'arguments'"),
])
def test_what_cannot_be_honoured_is_refused_in_a_sentence(message, sentence):
    with pytest.raises(DataError) as caught:
        read(message)
    assert sentence in str(caught.value)


def test_nulls_that_a_table_has_filled_in_are_left_out_of_chats_and_tools_alone():
    call = {"function": {"name": "f", "arguments": {"city": "Paris", "limit": None}}}
    record = {
        "messages": [{**USER, "tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": None}}}], "cases": [{"in": None}], "answer": None}
    assert without_filled_nulls(record) == {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Paris"}}}]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "cases": [{"in": None}], "answer": None}


@pytest.mark.parametrize("messages", ["text", [], [3], [{"role": "user"}], [{"content": "c"}], [{"from": "human"}],
                                      [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "assistant", "content": None}]])
def test_what_is_no_chat_is_refused_with_its_place(messages):
    with pytest.raises(DataError, match="^here: "):
        parse_messages(messages, "messages", "here")


def test_tools_are_a_list_of_objects_or_its_json():
    assert parse_tools(None, "tools", "here") == parse_tools("", "tools", "here") == parse_tools([], "tools", "here") == ()
    assert parse_tools('[{"name": "f", "x": null}]', "tools", "here") == ({"name": "f"},)
    assert parse_tools(['{"name": "f"}'], "tools", "here") == ({"name": "f"},)
    limit = {"type": ["integer", "null"], "default": None, "enum": [1, None], "description": None}
    [tool] = parse_tools([{"name": "f", "parameters": {"properties": {"limit": limit, "of_another_row": None}}}], "tools", "here")
    assert tool["parameters"]["properties"] == {"limit": {"type": ["integer", "null"], "default": None, "enum": [1, None]}}
    for wrong in ("{", "3", {"name": "f"}, ["f"]):
        with pytest.raises(DataError, match="here: field 'tools' must be a list of tools"):
            parse_tools(wrong, "tools", "here")


def test_a_chat_has_one_system_message():
    own = ({"role": "system", "content": "own"}, USER)
    assert with_system(own, "other") == own
    assert with_system((USER,), "other") == ({"role": "system", "content": "other"}, USER)
    assert with_system((USER,), "") == (USER,)
