"""Models that were taught chats and are asked with plain text, and templates that do not write what chats have."""

import pytest

from chats import CHATML, words
from offbeat.config.data import DataConfig
from offbeat.data.dataset import ListDataset
from offbeat.data.pairs import Preference
from offbeat.data.row import Row
from offbeat.data.template_use import replaced_forms, unused_template

CHAT = ({"role": "user", "content": "2+2"},)
WITH_SYSTEM = ({"role": "system", "content": "add"}, *CHAT)
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {}}}
THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
THINKS = CHATML.replace("message['content'] +", "message.get('reasoning_content', '') + message['content'] +")
OPENS = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")


@pytest.mark.parametrize(("template", "prompt", "as_chat", "model", "said"), [
    (CHATML, "2+2", False, "org/Base-1B", "the tokenizer of org/Base-1B has a chat template"),
    (CHATML, "2+2", True, "org/Base-1B", ""), (CHATML, CHAT, False, "org/Base-1B", ""), (CHATML, "2+2", False, "", ""),
    (None, "2+2", False, "org/Base-1B", ""), (None, "2+2", False, "models/gemma-3-1b-it/", "is named like a model that was taught chats"),
    (None, "2+2", False, "Qwen2.5-7B-Instruct", "its tokenizer has no chat template"), (None, "2+2", False, "credit-1b", "")])
def test_a_template_that_is_not_used_is_told(template: str | None, prompt: str, as_chat: bool, model: str, said: str) -> None:
    found = unused_template(words(template), prompt, DataConfig(chat_template=as_chat), model=model)
    assert said in found and bool(found) == bool(said)


@pytest.mark.parametrize(("template", "row", "said"), [
    (CHATML, Row("2+2", "4", tools=(TOOL,)), ()), (CHATML, Row(CHAT, "4"), ()), (CHATML, Row(WITH_SYSTEM, "4"), ()),
    (CHATML, Row(CHAT, "4", tools=(TOOL,)), ("tools, calls and results, which are given as text in Hermes' format",)),
    (CHATML, Row((*CHAT, {"role": "tool", "content": "4"}), "4"), ("tools, calls and results",)),
    (NO_SYSTEM, Row(WITH_SYSTEM, "4"), ("system messages, which are put before the user's first message",)),
    (NO_SYSTEM, Row(CHAT, "4"), ()),
    (CHATML, Row(CHAT, "4", said=THOUGHT), ("the thoughts of answers, which are written in <think> tags",)),
    (CHATML, Preference(CHAT, ((THOUGHT,), "5"), (True, False)), ("the thoughts of answers",)),
    (THINKS, Row(CHAT, "4", said=THOUGHT), ()), (OPENS, Row(CHAT, "4", said=THOUGHT), ()), (None, Row(CHAT, "4", tools=(TOOL,)), ()),
    (NO_SYSTEM, Row(WITH_SYSTEM, "4", said=THOUGHT, tools=(TOOL,)),
     ("tools, calls and results", "system messages", "the thoughts of answers")),
])
def test_what_a_template_does_not_write_is_told_with_its_form(
    template: str | None, row: Row | Preference, said: tuple[str, ...]) -> None:
    found = replaced_forms(words(template), ListDataset((row, row)), DataConfig(), imitated=True)
    assert all(found.count(part) == 1 for part in said) and bool(found) == bool(said)
    assert found.startswith("the chat template of tokenizer 'words' does not write ") or not found
    assert found.count("which are") == len(said)


def test_the_form_of_an_answer_counts_where_it_is_trained_on() -> None:
    assert replaced_forms(words(CHATML), ListDataset((Row(CHAT, "4", said=THOUGHT),)), DataConfig(), imitated=False) == ""


def test_a_system_prompt_of_the_settings_counts() -> None:
    data = DataConfig(system_prompt="add", chat_template=True)
    assert "system messages" in replaced_forms(words(NO_SYSTEM), ListDataset((Row("2+2", "4"),)), data, imitated=False)
