"""Thoughts in text: those that a prompt opens and the answer has to close, and those that a template leaves out.

Called by `data.chat`. Templates of reasoning models end prompts with `<think>` and the like, or with a thought that is closed already.
"""

import re

_WORDS = "think|thinking|thought|thoughts|reason|reasoning"
_TAGS = (
    *((f"<{word}>", f"</{word}>") for word in _WORDS.split("|")),
    ("<seed:think>", "</seed:think>"),
    ("<|start_think|>", "<|end_think|>"),
    ("<|think_start|>", "<|think_end|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)
"""Beginnings and ends of thoughts, such as "<think>" and "</think>", in the models of autumn 2026."""

_CLOSING = dict(_TAGS)
_OPEN = "|".join(re.escape(opening) for opening, _ in _TAGS)
_CLOSE = "|".join(re.escape(closing) for _, closing in _TAGS)
_EMPTY = re.compile(rf"\s*(?:(?:{_OPEN})\s*)?(?:{_CLOSE})\s*")
_BLOCK = re.compile(rf"\s*(?P<opening>{_OPEN})")

OPENED = re.compile(rf"(?:{_OPEN})\s*\Z")
"""A thought that a prompt opens and leaves open."""

CLOSED = re.compile(rf"(?:(?:{_OPEN})\s*)?(?:{_CLOSE})\s*\Z")
"""An empty thought at the end of a prompt, which asks for an answer without thoughts."""


def split_thought(content: str, asked: str = "") -> tuple[str, str]:
    """Return the thoughts that a text begins with, without their tags, and the rest; no thoughts if it begins with none.

    Where `asked`, the prompt of the text, opens a thought, the text may go on with that thought.
    """
    opened = _BLOCK.match(content)
    begun = OPENED.search(asked)
    if opened is None and begun is None:
        return "", content
    tag = opened["opening"] if opened is not None else begun.group().strip()  # type: ignore[reportOptionalMemberAccess]
    at = content.find(_CLOSING[tag])
    if at < 0:
        return "", content
    return content[0 if opened is None else opened.end() : at].strip(), content[at + len(_CLOSING[tag]):].lstrip()


def skip_empty(text: str, at: int, most: int) -> int:
    """Return the position after an empty thought at `at`, or after its mere end; `at` if there is none before `most`."""
    found = _EMPTY.match(text, at)
    return at if found is None or found.end() > most else found.end()


def close_thought(opened: str, thoughts: str) -> str:
    """Return the text after a prompt that ends with `opened`: the thoughts, which may be empty, and their end, such as "</think>"."""
    said = thoughts.strip()
    begun = "" if opened.endswith("\n") and said else "\n"
    return begun + (said + "\n" if said else "") + _CLOSING[opened.strip()] + "\n\n"


def write_thought(thoughts: str) -> str:
    """Return thoughts with their tags, for a template that writes none."""
    return f"<think>\n{thoughts.strip()}\n</think>\n\n"
