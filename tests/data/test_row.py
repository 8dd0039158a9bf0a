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
    ({"messages": "hi", "answer": "a"}, {"format": "messages"}, "must be a list of messages, got str"),
    ({"messages": [], "answer": "a"}, {"format": "messages"}, "must be a list of messages, got an empty list"),
    ({"messages": [{"role": "user"}], "answer": "a"}, {"format": "messages"}, "must have text in 'role' and 'content', got {\"role\""),
])
def test_an_unusable_record_says_where_and_why(record, config, sentence):
    with pytest.raises(DataError) as caught:
        parse(record, **config)
    assert sentence in str(caught.value)
    assert "line 3" in str(caught.value)
