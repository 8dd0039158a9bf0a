"""Chat templates as programs: checked, rendered, and the variables that they read. Called by `data.tokenizer`; torch-free.

A template is Jinja, which transformers compiles in a sandbox. It may raise anything, which callers catch.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from offbeat.data.forms import Form, Messages, Tools, find_form
from offbeat.errors import ModelError
from offbeat.user_code.boundary import Caught


def check_template(template: str) -> None:
    """Refuse a text that is no Jinja template; raises ModelError with the reason."""
    try:
        _compile_jinja_template(template)
    except TemplateError as exc:
        raise ModelError(f"the chat template of data.chat_template is no Jinja template: {exc}; mend it") from exc


def render_template(template: str, variables: Mapping[str, Any], messages: Messages, tools: Tools, *, to_answer: bool) -> str:
    """Render a chat that has the form for the template; `to_answer` adds the text before the assistant's next answer."""
    rendered: Any = render_jinja_template(
        [[dict(message) for message in messages]], tools=[dict(tool) for tool in tools] or None, chat_template=template,
        add_generation_prompt=to_answer, **variables)
    [text], _ = rendered
    return text


def render_marked(template: str, variables: Mapping[str, Any], messages: Messages, tools: Tools) -> tuple[str, list[tuple[int, int]]]:
    """Render a chat, and return the ranges of characters between the template's marks of generation as well, e.g. [(12, 40)]."""
    rendered: Any = render_jinja_template(
        [[dict(message) for message in messages]], tools=[dict(tool) for tool in tools] or None, chat_template=template,
        return_assistant_tokens_mask=True, **variables)
    [text], [spans] = rendered
    return text, [(start, end) for start, end in spans]


@lru_cache(maxsize=16)
def variables_read(template: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set itself, such as "enable_thinking"; none if it is no Jinja."""
    try:
        return frozenset(find_undeclared_variables(_compile_jinja_template(template).environment.parse(template)))
    except TemplateError:  # rendering reports the error
        return frozenset()


@lru_cache(maxsize=64)
def form_of(template: str, special_tokens: str, template_kwargs: str, with_tools: bool) -> Form:
    """Return the form of chats that a template writes in full, with variables as JSON; see `data.forms`."""
    variables = {**json.loads(special_tokens), **json.loads(template_kwargs)}

    def render(messages: Messages, tools: Tools) -> str | None:
        with Caught():  # a template may raise anything on these unusual chats
            return render_template(template, variables, messages, tools, to_answer=False)
        return None

    return find_form(render, with_tools=with_tools)
