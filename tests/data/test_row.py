"""Raw records to rows: the three formats, and every complaint."""

import pytest

from offbeat.config.data import DataConfig
from offbeat.data.row import Row, parse_record
from offbeat.data.wire import decode, encode
from offbeat.errors import DataError

GSM8K = {"question": "How many?", "answer": "He has 3 * 400 = <<3*400=1200>>1,200.\n#### 1,200"}
CHAT = [{"role": "system", "content": "s", "name": "x"}, {"role": "user", "content": "u"}]


def parse(record, **config):
    return parse_record(record, DataConfig(**config), where="'f.jsonl', line 3")


def test_a_plain_record_keeps_its_other_fields_as_text():
    row = parse({"prompt": "1+1=", "answer": 2, "level": "easy", "numbers": [1, 1]})
    assert row == Row("1+1=", "2", {"level": "easy", "numbers": "[1, 1]"})


def test_gsm8k_takes_the_number_after_the_marks_and_keeps_the_solution():
    row = parse(GSM8K, format="gsm8k")
    assert row.answer == "1200"
    assert row.prompt == GSM8K["question"]
    assert row.solution == GSM8K["answer"]
    assert parse({"question": "q", "answer": "a #### 1\n#### -2.5 "}, format="gsm8k").answer == "-2.5"


def test_messages_become_a_chat_of_role_and_content():
    row = parse({"messages": CHAT, "answer": "a"}, format="messages")
    assert row.prompt == ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})


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
    assert parse({"q": "x", "a": "y"}, prompt_field="q", answer_field="a") == Row("x", "y")


@pytest.mark.parametrize("row", [Row("p", "a", {"k": "v"}, "s"), Row(({"role": "user", "content": "u"},), "a")])
def test_rows_cross_processes(row):
    assert decode(Row, encode(row)) == row


@pytest.mark.parametrize(("record", "config", "sentence"), [
    ({"prompt": "p", "label": 1}, {}, "line 3, has no field 'answer'; it has prompt, label; set data.answer_field or data.format"),
    ({}, {}, "has no field 'prompt'; it has none"),
    ({"prompt": 3, "answer": "a"}, {}, "field 'prompt' must be text, got int"),
    ({"prompt": "p", "answer": None}, {}, "field 'answer' must be text or a number, got null"),
    ({"prompt": "p", "answer": True}, {}, "field 'answer' must be text or a number, got bool"),
    ({"question": "p", "answer": "42"}, {"format": "gsm8k"}, "a GSM8K answer must end in '#### ' and a number, got '42'"),
    ({"messages": CHAT}, {"format": "messages"}, "has no answer: the chat in 'messages' does not end with the assistant's message"),
    ({"chat": CHAT}, {"format": "messages"}, "has no field 'messages'; it has chat"),
    ({"messages": SAID[-1:]}, {"format": "messages"}, "the chat in 'messages' has nothing before the assistant's message"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, {"format": "messages"}, "must have text in 'role' and 'content'"),
    ({"messages": [{**SAID[-1], "tool_calls": [1]}]}, {"format": "messages"}, "has tool_calls, which are not supported"),
    ({"messages": "hi", "answer": "a"}, {"format": "messages"}, "must be a list of messages, got str"),
    ({"messages": [], "answer": "a"}, {"format": "messages"}, "must be a list of messages, got an empty list"),
    ({"messages": [{"role": "user"}], "answer": "a"}, {"format": "messages"}, "must have text in 'role' and 'content', got {\"role\""),
])
def test_an_unusable_record_says_where_and_why(record, config, sentence):
    with pytest.raises(DataError) as caught:
        parse(record, **config)
    assert sentence in str(caught.value)
    assert "line 3" in str(caught.value)
