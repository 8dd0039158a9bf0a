"""Whether a model that was taught chats is asked with plain text. Told once, by `offbeat config check` and at the start of a run."""

import re

from offbeat.config.data import DataConfig
from offbeat.data.row import Prompt
from offbeat.data.tokenizer import Tokenizer

_TAUGHT = re.compile(r"(?<![a-z])(instruct|chat|it)(?![a-z])", re.IGNORECASE)
"""What names of models that were taught chats hold, as in Qwen2.5-7B-Instruct and gemma-3-1b-it."""


def unused_template(tokenizer: Tokenizer, prompt: Prompt, data: DataConfig, *, model: str) -> str:
    """Say that prompts are plain text although the model was taught chats; "" where they are chats, or nothing speaks for such a model.

    Args:
        prompt: of the first row.
        model: `model.path`; empty for the tiny model, which was taught nothing.
    """
    if not model or data.chat_template or not isinstance(prompt, str):
        return ""
    if tokenizer.has_chat_template:
        return (
            f"prompts are plain text, and the tokenizer of {model} has a chat template: a model that was taught chats answers plain text"
            " worse, and may not end its answers; set data.chat_template = true, unless it is a base model")
    if _TAUGHT.search(model.rstrip("/").rpartition("/")[2]):
        return (
            f"prompts are plain text, and {model} is named like a model that was taught chats, but its tokenizer has no chat template; put"
            " its chat_template.jinja beside tokenizer.json and set data.chat_template = true, unless it is a base model")
    return ""
