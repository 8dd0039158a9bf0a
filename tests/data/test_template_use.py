"""Models that were taught chats and are asked with plain text."""

import pytest

from chats import CHATML, words
from offbeat.config.data import DataConfig
from offbeat.data.template_use import unused_template

CHAT = ({"role": "user", "content": "2+2"},)


@pytest.mark.parametrize(("template", "prompt", "as_chat", "model", "said"), [
    (CHATML, "2+2", False, "org/Base-1B", "the tokenizer of org/Base-1B has a chat template"),
    (CHATML, "2+2", True, "org/Base-1B", ""), (CHATML, CHAT, False, "org/Base-1B", ""), (CHATML, "2+2", False, "", ""),
    (None, "2+2", False, "org/Base-1B", ""), (None, "2+2", False, "models/gemma-3-1b-it/", "is named like a model that was taught chats"),
    (None, "2+2", False, "Qwen2.5-7B-Instruct", "its tokenizer has no chat template"), (None, "2+2", False, "credit-1b", "")])
def test_a_template_that_is_not_used_is_told(template: str | None, prompt: str, as_chat: bool, model: str, said: str) -> None:
    found = unused_template(words(template), prompt, DataConfig(chat_template=as_chat), model=model)
    assert said in found and bool(found) == bool(said)
