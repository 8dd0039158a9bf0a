"""Raw records to rows: the three formats, and every complaint."""

import json
from decimal import Decimal

import pytest

from offbeat.config.data import DataConfig
from offbeat.data.messages import is_learnt
from offbeat.data.row import Row, parse_record
from offbeat.data.wire import decode, encode
from offbeat.errors import DataError

GSM8K = {"question": "How many?", "answer": "He has 3 * 400 = <<3*400=1200>>1,200.\n#### 1,200"}
CHAT = [{"role": "system", "content": "s", "name": "x"}, {"role": "user", "content": "u"}]


def parse(record, **config):
    return parse_record(record, DataConfig(**config), where="'f.jsonl', line 3")


def test_a_plain_record_keeps_its_other_fields_as_text():
    row = parse({"prompt": "1+1=", "answer": 2, "level": "easy", "numbers": [1, 1]})
    assert row == Row("1+1=", "2", {"answer": "2", "level": "easy", "numbers": "[1, 1]"}, json_fields=("answer", "numbers"))


def test_gsm8k_takes_the_number_after_the_marks_and_keeps_the_solution():
    row = parse(GSM8K, format="gsm8k")
    assert row.answer == "1200"
    assert row.prompt == GSM8K["question"]
    assert row.solution == GSM8K["answer"]
    assert parse({"question": "q", "answer": "a #### 1\n#### -2.5 "}, format="gsm8k").answer == "-2.5"


def test_messages_become_a_chat_of_role_and_content():
    row = parse({"messages": CHAT, "answer": "a"}, format="messages")
    assert row.prompt == ({"role": "system", "content": "s", "name": "x"}, {"role": "user", "content": "u"})


SAID = [*CHAT, {"role": "assistant", "content": "1+1=2"}]


def test_what_the_assistant_says_last_is_the_answer_and_not_part_of_the_prompt():
    row = parse({"messages": SAID, "level": "easy"}, format="messages")
    assert [message["content"] for message in row.prompt] == ["s", "u"]
    assert row == Row(row.prompt, "1+1=2", {"level": "easy"})
    again = parse({"messages": [*SAID, CHAT[1], SAID[-1]], "answer": None}, format="messages")
    assert [message["role"] for message in again.prompt] == ["system", "user", "assistant", "user"]


def test_an_answer_beside_a_chat_is_what_a_reward_compares_with_and_the_chat_what_is_imitated():
    row = parse({"messages": SAID, "answer": 2}, format="messages")
    assert (row.answer, row.solution, len(row.prompt)) == ("2", "1+1=2", 2)


def test_field_names_can_be_given():
    assert parse({"q": "x", "a": "y"}, prompt_field="q", answer_field="a") == Row("x", "y", {"a": "y"})
    row = parse({"q": "x", "truth": 7, "persona": "You are brief."}, prompt_field="q", answer_field="truth", system_field="persona")
    assert row.prompt == ({"role": "system", "content": "You are brief."}, {"role": "user", "content": "x"})
    assert (row.answer, row.extra, row.json_fields) == ("7", {"truth": "7"}, ("truth",))
    assert parse({"prompt": "x", "answer": "y", "persona": None}, system_field="persona") == Row("x", "y")


def test_a_template_makes_the_prompt_of_columns_that_rewards_still_see():
    record = {"question": "2+2?", "hints": ["add"], "n": 2, "answer": "4"}
    row = parse(record, prompt="{question} {hints} {n}: ")
    assert row.prompt == '2+2? ["add"] 2: '
    assert row.extra == {"question": "2+2?", "hints": '["add"]', "n": "2"}
    assert parse(GSM8K, format="gsm8k", prompt="{question}") == parse(GSM8K, format="gsm8k")


def test_without_need_of_one_a_row_may_have_no_answer():
    def asked(record, **config):
        return parse_record(record, DataConfig(**config), where="here", needs_answer=False)

    assert asked({"prompt": "p"}) == Row("p", "")
    assert asked({"prompt": "p", "answer": None}).answer == ""
    assert asked({"messages": CHAT}).answer == ""
    with pytest.raises(DataError, match="has no field 'truth'"):
        asked({"prompt": "p"}, answer_field="truth")


@pytest.mark.parametrize(("record", "roles", "answer"), [
    ({"prompt": "p", "completion": "c"}, "text", "c"),
    ({"prompt": CHAT, "completion": [{"role": "assistant", "content": "c"}]}, "su", "c"),
    ({"prompt": CHAT, "answer": "a"}, "su", "a"),
    ({"messages": [*CHAT, {"role": "assistant", "content": "c"}]}, "su", "c"),
    ({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "c"}]}, "u", "c"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "answer": "x"}, "u", "x"),
])
def test_layouts_are_told_apart_by_their_columns(record, roles, answer):
    row = parse(record)
    assert row.answer == answer
    assert roles == ("text" if isinstance(row.prompt, str) else "".join(message["role"][0] for message in row.prompt))


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": None, "type": "object"}}}


def test_tools_and_their_calls_are_kept_as_templates_take_them():
    called = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    row = parse({"messages": called, "tools": [TOOL]})
    made = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    assert row.said == row.imitated == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert row.tools == ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
    assert json.loads(row.answer) == [made] and row.extra == {}
    assert parse({"messages": called, "tools": json.dumps([TOOL])}).tools == row.tools
    went_on = parse({"messages": [
        *called, {"role": "tool", "name": "add", "tool_call_id": "1", "content": "3"}, {"role": "assistant", "content": "It is 3."}]})
    assert went_on.prompt[-1] == {"role": "tool", "name": "add", "tool_call_id": "1", "content": "3"}
    assert went_on.prompt[-2]["tool_calls"] == [CALL]
    assert (went_on.answer, went_on.said) == ("It is 3.", None)


def test_tools_are_read_in_their_older_form_and_beside_text_that_becomes_a_chat():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    assert parse({"messages": SAID, "functions": [tool["function"]]}).tools == (tool,)
    assert parse({"prompt": "1+1", "answer": "2", "tools": [tool]}, chat_template=True).tools == (tool,)
    assert parse({"prompt": "1+1", "answer": "2", "tools": "hammer", "functions": "f"}).tools == ()
    with pytest.raises(DataError, match="line 3 has both 'tools' and 'functions'; leave one of them out"):
        parse({"messages": SAID, "tools": [tool], "functions": [tool["function"]]})


def test_a_system_message_may_stand_beside_the_chat():
    chat = [{"from": "user", "value": "u"}, {"from": "assistant", "value": "a"}]
    assert parse({"system": "You call f.", "conversations": chat}).prompt == (
        {"role": "system", "content": "You call f."}, {"role": "user", "content": "u"})
    assert parse({"system": "other", "messages": SAID}).prompt[0]["content"] == "s", "a chat's own comes first"
    assert parse({"system": "x", "prompt": "p", "answer": "a"}).prompt == "p"


def test_a_chat_as_json_text_is_a_chat_and_other_text_under_its_name_is_refused():
    as_list, as_text = ({"messages": chat} for chat in (SAID, json.dumps(SAID)))
    assert parse(as_text) == parse(as_list)
    assert parse({"prompt": json.dumps(CHAT), "answer": "a"}).prompt == parse({"prompt": CHAT, "answer": "a"}).prompt
    assert parse({"prompt": json.dumps(CHAT), "answer": "a"}, format="prompt_answer").prompt == json.dumps(CHAT)
    pair = {"prompt": json.dumps(CHAT), "completion": json.dumps(SAID[-1:])}
    row, same = parse(pair), parse({"prompt": CHAT, "completion": SAID[-1:]})
    assert (row.prompt, row.answer) == (same.prompt, same.answer)


TURNS = [CHAT[1], {"role": "assistant", "content": "5"}, {"role": "user", "content": "no"}]


def test_a_prompt_with_a_completion_beside_it_is_context():
    for rest in ({"completion": SAID[-1:]}, {"answer": "1+1=2"}, {"completion": "1+1=2"}):
        row = parse({"prompt": TURNS, **rest})
        assert [is_learnt(message) for message in (*row.prompt, row.imitated)] == [False, False, False, True]
    row = parse({"messages": TURNS, "answer": "1+1=2"})
    assert [is_learnt(message) for message in (*row.prompt, row.imitated)] == [False, True, False, True]
    with pytest.raises(DataError, match="the chat in 'prompt' ends with the assistant's message, which 'completion' cannot go on with"):
        parse({"prompt": TURNS[:2], "completion": SAID[-1:]})


def test_a_chat_ends_with_the_last_message_that_is_learnt():
    wrong = {"role": "assistant", "content": "5", "weight": 0}
    row = parse({"messages": [*SAID, CHAT[1], wrong]})
    assert (row.answer, len(row.prompt)) == ("1+1=2", 2)
    with pytest.raises(DataError, match="all of the assistant's messages in 'messages' are marked not to be trained on"):
        parse({"messages": [*CHAT, wrong]})


@pytest.mark.parametrize("row", [
    Row("p", "a", {"k": "v"}, "s"), Row(({"role": "user", "content": "u"},), "a"),
    Row(({"role": "user", "content": "u"},), "a", tools=({"type": "function"},), json_fields=("k",),
        said={"role": "assistant", "content": "", "tool_calls": []})])
def test_rows_cross_processes(row):
    assert decode(Row, encode(row)) == row


@pytest.mark.parametrize(("record", "config", "sentence"), [
    ({"prompt": "p", "label": 1}, {},
     "line 3, has no field 'answer'; it has prompt, label; set data.answer_field or data.format; an answer is needed where"),
    ({}, {}, "has no field 'prompt'; it has none"),
    ({"prompt": 3, "answer": "a"}, {}, "field 'prompt' must be text, got int"),
    ({"prompt": "p", "answer": None}, {}, "field 'answer' must be text or a number, got null"),
    ({"prompt": "p", "answer": True}, {}, "field 'answer' must be text or a number, got bool"),
    ({"question": "p", "answer": "42"}, {"format": "gsm8k"}, "a GSM8K answer must end in '#### ' and a number, got '42'"),
    ({"messages": CHAT}, {"format": "messages"}, "has no answer: the chat in 'messages' does not end with the assistant's message"),
    ({"chat": CHAT}, {"format": "messages"}, "has no field 'messages'; it has chat"),
    ({"messages": SAID[-1:]}, {"format": "messages"}, "the chat in 'messages' has nothing before the assistant's message"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, {"format": "messages"}, "must have text in 'role' and 'content'"),
    ({"messages": [{**SAID[-1], "tool_calls": [1]}]}, {"format": "messages"}, "tool_calls of a message in 'messages' must be a list of"),
    ({"messages": [{**SAID[-1], "tool_calls": [{"id": "1"}]}]}, {"format": "messages"}, "must have a function with a 'name'"),
    ({"messages": [{**SAID[-1], "tool_calls": [{"name": "f", "arguments": "{"}]}]}, {}, "the arguments of a tool call in 'messages' are"),
    ({"messages": SAID, "tools": "add"}, {}, "field 'tools' must be a list of tools, each an object that describes a function, got str"),
    ({"q": "x", "answer": "y"}, {"prompt": "{quest}"}, "line 3, has no field 'quest'; it has q, answer"),
    ({"quests": "x", "answer": "y"}, {"prompt": "{quest}"}, "did you mean 'quests'?"),
    ({"q": None, "answer": "y"}, {"prompt": "{q}"}, "field 'q', which data.prompt names, is null"),
    ({"prompt": "x", "answer": "y"}, {"system_field": "persona"}, "has no field 'persona'; it has prompt, answer; set data.system_field"),
    ({"prompt": CHAT, "answer": "y"}, {"format": "prompt_answer"}, "field 'prompt' must be text, got list; a chat needs data.format ="),
    ({"messages": "hi", "answer": "a"}, {"format": "messages"}, "must be a list of messages, or one as JSON text, got str"),
    ({"messages": "hi", "answer": "a"}, {}, "must be a list of messages, or one as JSON text, got str"),
    ({"messages": str(SAID)}, {}, "field 'messages' holds a chat as Python prints it, which is not JSON"),
    ({"messages": [], "answer": "a"}, {"format": "messages"}, "must be a list of messages, got an empty list"),
    ({"messages": [{"role": "user"}], "answer": "a"}, {"format": "messages"}, "must have text in 'role' and 'content', got {\"role\""),
])
def test_an_unusable_record_says_where_and_why(record, config, sentence):
    with pytest.raises(DataError) as caught:
        parse(record, **config)
    assert sentence in str(caught.value)
    assert "line 3" in str(caught.value)


@pytest.mark.parametrize(("answer", "text"), [
    (True, "true"), (False, "false"), (["12", "twelve"], '["12", "twelve"]'), ({"value": "12"}, '{"value": "12"}'), (7, "7"), ([], "[]")])
def test_an_answer_that_a_reward_of_ones_own_reads_is_kept_as_it_is(answer, text):
    row = parse_record({"prompt": "?", "answer": answer}, DataConfig(), where="w", needs_answer=False)
    assert (row.answer, json.loads(row.extra["answer"]), row.json_fields) == (text, answer, ("answer",))
    chat = parse_record({"messages": CHAT, "answer": answer}, DataConfig(format="messages"), where="w", needs_answer=False)
    assert (chat.answer, json.loads(chat.extra["answer"])) == (text, answer)


@pytest.mark.parametrize("answer", [True, ["12"], {"value": 1}, float("nan"), None])
def test_an_answer_that_has_to_be_text_is_refused_with_the_reason(answer):
    with pytest.raises(DataError, match="'answer' must be text or a number, got .*; an answer is needed where it is imitated"):
        parse({"prompt": "?", "answer": answer})


def test_nan_is_an_absent_answer_and_a_decimal_is_one_with_its_text():
    absent = parse_record({"prompt": "?", "answer": float("nan")}, DataConfig(), where="w", needs_answer=False)
    assert absent == parse_record({"prompt": "?", "answer": None}, DataConfig(), where="w", needs_answer=False) == Row("?", "")
    with pytest.raises(DataError, match="got NaN, which stands for a missing value"):
        parse({"prompt": "?", "answer": float("nan")})
    assert parse({"prompt": "?", "answer": Decimal("0.10")}).answer == "0.10"
