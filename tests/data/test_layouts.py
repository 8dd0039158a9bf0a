"""Records as published data sets lay them out."""

import json

import pytest

from offbeat.config.data import DataConfig
from offbeat.data.pairs import holds_pairs, parse_preference
from offbeat.data.row import parse_record
from offbeat.errors import DataError

TOOL = {"name": "add", "description": "sum", "parameters": {"a": {"description": "one", "type": "int"}}}
CALL = {"name": "add", "arguments": {"a": 1}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def read(record, **settings):
    return parse_record(record, DataConfig(**settings), where="there", needs_answer=False)


def test_turns_of_input_and_output_are_a_chat_as_capybara_has_it():
    turns = [{"input": "one?", "output": "1"}, {"input": "two?", "output": "2"}]
    row = read({"source": "s", "conversation": turns})
    assert row.prompt == (user("one?"), assistant("1"), user("two?")) and row.answer == "2" and row.extra == {"source": "s"}
    assert read({"conversation": [turns[0], {"input": "two?", "output": None}], "answer": "2"}).prompt == row.prompt
    assert read({"conversation": [user("one?"), assistant("1")]}).prompt == (user("one?"),)


@pytest.mark.parametrize("as_text", [True, False])
def test_a_question_with_calls_is_a_chat_as_xlam_has_it(as_text):
    given = (lambda value: json.dumps(value)) if as_text else (lambda value: value)
    row = read({"id": 0, "query": "1 more?", "answers": given([CALL, CALL]), "tools": given([TOOL])})
    calls = [{"type": "function", "function": CALL}] * 2
    assert row.prompt == (user("1 more?"),) and json.loads(row.answer) == calls and row.tools == (TOOL,)
    assert row.imitated == {"role": "assistant", "content": "", "tool_calls": calls}
    assert json.loads(row.extra["answers"]) == [CALL, CALL] and "query" not in row.extra
    none = read({"query": "hello", "answers": given([]), "tools": given([TOOL])})
    assert none.prompt == (user("hello"),) and none.answer == ""


def test_a_preference_of_openai_is_a_pair_with_its_tools():
    tool = {"type": "function", "function": TOOL}
    record = {
        "input": {"messages": [user("one?")], "tools": [tool], "parallel_tool_calls": True},
        "preferred_output": [assistant("1")], "non_preferred_output": [assistant("2")]}
    assert holds_pairs(record)
    pair = parse_preference(record, DataConfig(), where="there")
    assert (pair.prompt, pair.answers, pair.liked) == ((user("one?"),), ((assistant("1"),), (assistant("2"),)), (True, False))
    assert pair.tools == (tool,)


def test_columns_that_are_named_or_read_anyway_are_not_changed():
    turns = [{"input": "one?", "output": "1"}]
    assert read({"prompt": "p", "answer": "a", "conversation": turns}).prompt == "p"
    assert read({"query": "q", "answers": "[]", "tools": [], "answer": "a"}, prompt_field="query").prompt == "q"
    chosen = {"prompt": "p", "chosen": "a", "rejected": "b", "input": "i"}
    assert parse_preference(chosen, DataConfig(), where="there").prompt == "p"


@pytest.mark.parametrize(("record", "sentence"), [
    ({"conversation": [{"input": "one?"}, {"input": "two?", "output": "2"}]}, "each turn in 'conversation' must have text in 'input'"),
    ({"query": 3, "answers": "[]", "tools": []}, "field 'query' must be text, got int"),
    ({"query": "q", "answers": "no calls", "tools": []}, "there: "),
    ({"conversation": "text"}, "has no field 'prompt'"),
])
def test_what_is_not_laid_out_so_is_refused(record, sentence):
    with pytest.raises(DataError, match=sentence):
        read(record)


@pytest.mark.parametrize(("asked", "sentence"), [
    ([user("one?")], "field 'input' must be an object with 'messages', got list"),
    ({"messages": [user("one?")], "instructions": "be brief"}, "field 'input' has 'instructions', which is not read; leave it out")])
def test_an_input_that_is_not_messages_with_tools_is_refused(asked, sentence):
    record = {"input": asked, "preferred_output": [assistant("1")], "non_preferred_output": [assistant("2")]}
    with pytest.raises(DataError, match=sentence):
        parse_preference(record, DataConfig(), where="there")
