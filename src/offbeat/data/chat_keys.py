"""Table of the roles and keys of messages in data, with their meanings and refusals. Read by `data.messages`.

docs/prompts.md shows both tables; a test compares them with these. A key that is in neither is given to the chat template as it is.
"""

from collections.abc import Mapping
from typing import Any

CALL = "call"
"""Our role of a message whose content is a call by the assistant, as JSON."""

ROLES: dict[str, tuple[str, ...]] = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "model", "bot", "ai", "chatgpt", "chatbot", "bard", "bing"),
    "tool": ("tool", "function", "observation", "tool_response", "function_response", "ipython"),
    CALL: ("function_call", "tool_call", "tool_calls"),
}
"""Names of roles in data, in lower case, by our role."""

READ_AS = {name: role for role, names in ROLES.items() for name in names}

ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of the assistant's thoughts; each template knows one of them, and is given all three."""
MARKS = ("weight", "train", "training", "loss")
"""Keys that say whether an assistant's message is trained on: 0 and false say that it is context."""

REFUSED: dict[str, str] = {
    "refusal": "put what the assistant says into 'content'",
    "prefix": "only whole messages can be read; leave it out, or put the beginning of the answer into the prompt's text",
    "train_detail": "a message is trained on as a whole or not at all; mark it with \"weight\": 0, or divide the row",
    "reasoning_details": "give the thoughts as text in 'reasoning'",
    "thinking_blocks": "give the thoughts as text in 'thinking'",
    "channel": "give what stands in the channel 'analysis' as 'thinking' of the message that follows it, and leave the key out",
    "recipient": "give a call in 'tool_calls'",
    "audio": "only text can be read",
    "audios": "only text can be read",
    "image": "only text can be read",
    "images": "only text can be read",
    "video": "only text can be read",
    "videos": "only text can be read",
}
"""Keys that are refused unless they hold nothing, each with advice."""

MEANINGS: dict[str, str] = {
    "`role`, or `from`": "who says it; see the table of roles",
    "`content`, or `value`": "the text, or parts of text; parts of the type `thinking` are the assistant's thoughts, and"
    " [images](images.md) are others",
    "`reasoning_content`, `reasoning`, `thinking`": "the assistant's thoughts; the chat template is given all three names",
    "`tool_calls`": "the assistant's calls, each with a `name` and `arguments`, alone or below `function`; arguments are an object or its"
    " JSON text, and the chat template is given them in the form that it takes",
    "`function_call`": "one call, in the older form of OpenAI; becomes `tool_calls`",
    "`tool_call_id`, `name`": "given to the chat template",
    "`weight`, `train`, `training`, `loss`": "0 or false: this message of the assistant is context, and not trained on; 1 or true: as"
    " without the key. Other values are refused, and 1 or true of others than the assistant",
    ", ".join(f"`{name}`" for name in REFUSED): "refused, unless null or empty",
    "any other": "given to the chat template; templates ignore what they do not know",
}
"""Meaning of each key of a message, for the documentation."""


def role_lines() -> list[str]:
    """Return the rows of the table of roles in the documentation."""
    read = {**{role: f"`{role}`" for role in ROLES}, CALL: "the assistant's calls; the content is JSON of one call, or of a list of them"}
    return [f"| {', '.join(f'`{name}`' for name in names)} | {read[role]} |" for role, names in ROLES.items()]


def key_lines() -> list[str]:
    """Return the rows of the table of keys in the documentation."""
    return [f"| {key} | {meaning} |" for key, meaning in MEANINGS.items()]


def read_role(name: str) -> str | None:
    """Return our role for a name in any case, such as "assistant" for "GPT"; None if it is not in `ROLES`."""
    return READ_AS.get(name.strip().lower().replace("-", "_").replace(" ", "_"))


def holds_message(value: Any) -> bool:
    """Whether a value is an object with a role."""
    return isinstance(value, Mapping) and any(key in value for key in ROLE_KEYS)
