"""Prompts as templates write them, and what a further turn adds."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbeat.chat.messages import Message, Tool, ToolCall
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer, arguments_of
from offbeat.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from offbeat.errors import ModelError, RefusedError
from support.chat_templates import LLAMA, MISTRAL, PLAIN, QWEN, QWEN_THINKING, tokenizer_with

SMOLLM2 = Path(__file__).parents[2] / ".models/smollm2-135m-instruct"
ADD = Tool("add", "Add two numbers.", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})
LOOK = Tool("look_up", "Look a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})
CALL = ToolCall("call_1", "add", '{"a": 3, "b": 4}')
CHAT = (
    Message("system", "Be exact."), Message("user", "what is 3 + 4?"), Message("assistant", calls=(CALL,)),
    Message("tool", "7", call_id="call_1", name="add"))


def shown(renderer: Renderer, *args, **kwargs) -> str:
    return renderer.tokenizer.decode(renderer.prompt(*args, **kwargs), skip_special_tokens=False)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    if not SMOLLM2.is_dir():
        pytest.skip("needs the model of make smollm2")
    return load_tokenizer(SMOLLM2)


# -- prompts -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "name"), [(QWEN, "hermes"), (QWEN_THINKING, "hermes"), (LLAMA, "llama3"), (MISTRAL, "mistral")])
def test_a_template_that_knows_tools_writes_them_itself(template, name) -> None:
    renderer = Renderer(tokenizer_with(template))
    assert renderer.writes_tools and renderer.format is not None and renderer.format.name == name
    text = shown(renderer, CHAT, [ADD])
    assert "Add two numbers." in text and "Be exact." in text and "You may call" not in text


def test_arguments_reach_the_template_as_an_object() -> None:
    assert '{"name": "add", "arguments": {"a": 3, "b": 4}}' in shown(Renderer(tokenizer_with(QWEN)), CHAT, [ADD])


def test_a_template_that_joins_strings_gets_arguments_as_text() -> None:
    template = QWEN.replace("{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}")
    renderer = Renderer(tokenizer_with(template, ("<|im_start|>", "<|im_end|>")))
    assert renderer.writes_tools and '"arguments": {"a": 3, "b": 4}}' in shown(renderer, CHAT, [ADD])


def test_without_a_word_of_tools_in_the_template_they_come_into_the_messages() -> None:
    renderer = Renderer(tokenizer_with(PLAIN))
    assert not renderer.writes_tools
    text = shown(renderer, CHAT, [ADD])
    assert text.startswith("<|im_start|>system\nBe exact.\n\n# Tools") and json.dumps(dict(ADD.parameters)) in text
    assert (
        'assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n") in text


def test_results_of_parallel_calls_are_one_message_of_the_user() -> None:
    calls = (CALL, ToolCall("call_2", "add", "{}"))
    chat = [*CHAT[:2], Message("assistant", "Now.", calls), CHAT[3], Message("tool", "0", call_id="call_2", name="add")]
    text = shown(Renderer(tokenizer_with(PLAIN)), chat, [ADD])
    assert "assistant\nNow.\n<tool_call>" in text
    assert "user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n0\n</tool_response><|im_end|>" in text


def test_without_tools_a_chat_is_what_the_template_makes_of_it() -> None:
    tokenizer = tokenizer_with(PLAIN)
    chat = [Message("user", "hi"), Message("assistant", "hello"), Message("user", "bye")]
    assert Renderer(tokenizer).prompt(chat) == tokenizer.chat([{"role": m.role, "content": m.content} for m in chat])


def test_a_system_message_comes_before_the_first_users_where_the_template_has_none() -> None:
    text = shown(Renderer(tokenizer_with(MISTRAL)), CHAT[:2])
    assert text == "<s>[INST] Be exact.\n\nwhat is 3 + 4?[/INST]"


def test_ids_of_calls_are_what_a_strict_template_wants() -> None:
    text = shown(Renderer(tokenizer_with(MISTRAL)), CHAT, [ADD])
    assert text.count('"0000call1"') == 2


def test_a_forced_beginning_is_encoded_after_the_prompt() -> None:
    renderer = Renderer(tokenizer_with(QWEN))
    opening = renderer.opening("required", "add")
    assert opening == '<tool_call>\n{"name": "add", "arguments": '
    assert renderer.prompt(CHAT, [ADD], opening=opening) == renderer.prompt(CHAT, [ADD]) + renderer.opening_ids(opening)
    assert renderer.opening("required") == '<tool_call>\n{"name": "' and renderer.opening("auto") == renderer.opening("none") == ""


def test_a_forced_call_closes_the_reasoning_that_the_template_opened() -> None:
    assert Renderer(tokenizer_with(QWEN_THINKING)).opening("required", "add").startswith("\n</think>\n\n<tool_call>")


def test_a_template_without_a_word_for_a_chat_says_so() -> None:
    two = Message("assistant", calls=(CALL, ToolCall("call_2", "add", "{}")))
    with pytest.raises(ModelError, match="only supports single tool-calls"):
        Renderer(tokenizer_with(LLAMA)).prompt([*CHAT[:2], two], [ADD])
    with pytest.raises(ModelError, match="has no chat template"):
        Renderer(character_tokenizer(chat_template=None))


def test_a_format_can_be_named() -> None:
    renderer = Renderer(tokenizer_with(QWEN), tool_format="qwen-xml")
    assert renderer.writes_tools and renderer.opening("required", "add") == "<tool_call>\n<function=add>\n"
    with pytest.raises(ModelError, match="tool format 'morse' is unknown; use one of deepseek"):
        Renderer(tokenizer_with(QWEN), tool_format="morse")
    with pytest.raises(ModelError, match="writes no tools, so the tool format must be 'hermes'"):
        Renderer(tokenizer_with(PLAIN), tool_format="mistral")


def test_a_past_call_with_broken_arguments_is_refused() -> None:
    with pytest.raises(RefusedError, match="not JSON"):
        arguments_of(ToolCall("c", "add", "{"))
    with pytest.raises(RefusedError, match=r"must be a JSON object, got .\[1\]"):
        arguments_of(ToolCall("c", "add", "[1]"))
    assert arguments_of(ToolCall("c", "add", "")) == {}


# -- turns ---------------------------------------------------------------------------------------------------------------------------------


TEXT = st.text("abc <>{}\n\".,'", max_size=12).filter(lambda text: text == text.strip())
CALLS = st.lists(
    st.one_of(
        st.builds(lambda a, b: ("add", {"a": a, "b": b}), st.integers(-9, 99), st.integers()),
        st.builds(lambda word: ("look_up", {"word": word}), TEXT)),
    min_size=1, max_size=1)


@st.composite
def chats(draw, calls=CALLS, user_turns: bool = True) -> list[Message]:
    """A chat of some turns, each of which answers with text or calls; it ends with what the assistant is to answer."""
    ids = (f"call{i:05d}" for i in itertools.count())
    chat = [Message("system", draw(TEXT)), Message("user", draw(TEXT))]
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()) or not user_turns:
            made = tuple(ToolCall(next(ids), name, json.dumps(arguments)) for name, arguments in draw(calls))
            chat.append(Message("assistant", calls=made))
            chat += [Message("tool", draw(TEXT), call_id=call.id, name=call.name) for call in made]
        else:
            chat += [Message("assistant", draw(TEXT.filter(bool))), Message("user", draw(TEXT))]
    return chat


def in_turns(renderer: Renderer, chat: list[Message], tools: list[Tool]) -> list[int]:
    """Put a chat's prompt together turn by turn: the first is rendered whole, and each further one is what `following` says."""
    answers = [at for at, message in enumerate(chat) if message.role == "assistant"]
    ids = renderer.prompt(chat[: answers[0]] if answers else chat, tools)
    for at, then in itertools.pairwise([*answers, len(chat)]):
        whole = renderer.tokenizer.encode(renderer._prompt_text(chat[: at + 1], tools, to_answer=False))
        end = renderer.end_of_turn[0]
        ids = [*ids, *whole[len(ids) : len(whole) - whole[::-1].index(end)]]  # what the engine sampled: the answer and its end token
        added = renderer.following(chat[at], chat[at + 1 : then], tools)
        assert added is not None
        ids += added
    return ids


@pytest.mark.parametrize(("template", "several"), [(QWEN, True), (PLAIN, True), (LLAMA, False)])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), with_tools=st.booleans())
def test_turns_add_up_to_the_chat_rendered_as_a_whole(template, several, data, with_tools) -> None:
    renderer = Renderer(tokenizer_with(template))
    tools = [ADD, LOOK] if with_tools else []
    chat = data.draw(chats(st.lists(CALLS.map(lambda c: c[0]), min_size=1, max_size=2) if several else CALLS))
    assert in_turns(renderer, chat, tools) == renderer.prompt(chat, tools)


@settings(max_examples=15, deadline=None)
@given(chat=chats(user_turns=False))
def test_turns_of_a_template_that_moves_tools_add_up_until_the_user_speaks(chat) -> None:
    renderer = Renderer(tokenizer_with(MISTRAL))
    assert in_turns(renderer, chat, [ADD, LOOK]) == renderer.prompt(chat, [ADD, LOOK])
    assert renderer.following(Message("assistant", "ok"), [Message("user", "more")], [ADD]) is None


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chat=chats(), with_tools=st.booleans())
def test_turns_of_a_real_tokenizer_add_up(smollm2, chat, with_tools) -> None:
    renderer = Renderer(smollm2)
    tools = [ADD, LOOK] if with_tools else []
    assert in_turns(renderer, chat, tools) == renderer.prompt(chat, tools)


def test_sampled_reasoning_does_not_keep_a_turn_from_being_added() -> None:
    renderer = Renderer(tokenizer_with(QWEN_THINKING))
    added = renderer.following(Message("assistant", "7", reasoning="hm"), [Message("user", "sure?")])
    assert added is not None
    assert renderer.tokenizer.decode(added, skip_special_tokens=False) == (
        "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n<think>\n")


def test_some_turns_cannot_be_added() -> None:
    answer, user = Message("assistant", "ok"), Message("user", "more")
    renderer = Renderer(tokenizer_with(PLAIN))
    assert renderer.following(answer, []) is None
    assert renderer.following(answer, [Message("system", "new rules"), user]) is None
    assert renderer.following(answer, [user, Message("assistant", "as if"), user]) is None
    endless = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    renderer = Renderer(tokenizer_with(endless))
    assert renderer.end_of_turn == () and renderer.following(answer, [user]) is None
    rewrites = PLAIN.replace("{{ '<|im_start|>' +", "{{ messages | length }}{{ '<|im_start|>' +")
    assert Renderer(tokenizer_with(rewrites, ("<|im_start|>", "<|im_end|>"))).following(answer, [user]) is None


def test_a_further_turn_may_begin_with_a_forced_call() -> None:
    renderer = Renderer(tokenizer_with(QWEN))
    opening = renderer.opening("required", "add")
    plain, forced = (renderer.following(CHAT[2], CHAT[3:], [ADD], opening=text) for text in ("", opening))
    assert plain is not None and forced == plain + renderer.opening_ids(opening)


# -- there and back ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "most"), [(QWEN, 3), (PLAIN, 3), (LLAMA, 1), (MISTRAL, 3)])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_rendered_call_is_read_back_as_it_was(template, most, data) -> None:
    renderer = Renderer(tokenizer_with(template))
    made = data.draw(st.lists(CALLS.map(lambda c: c[0]), min_size=1, max_size=most))
    calls = tuple(ToolCall(f"call{at:05d}", name, json.dumps(arguments)) for at, (name, arguments) in enumerate(made))
    content = data.draw(TEXT.filter(lambda text: "<" not in text)) if template in (QWEN, PLAIN) else ""
    before = renderer._prompt_text([Message("user", "x")], [ADD, LOOK], to_answer=True)
    text = renderer._prompt_text([Message("user", "x"), Message("assistant", content, calls)], [ADD, LOOK], to_answer=False)
    end = renderer.tokenizer.decode(list(renderer.end_of_turn), skip_special_tokens=False)
    ids = (call.id for call in calls)
    parsed = AnswerParser(renderer).parse(text[len(before) :].rstrip().removesuffix(end), [ADD, LOOK], call_ids=lambda: next(ids))
    assert not parsed.malformed and parsed.message.content == content
    assert [(c.id, c.name, json.loads(c.arguments)) for c in parsed.message.calls] == [
        (c.id, c.name, json.loads(c.arguments)) for c in calls]
