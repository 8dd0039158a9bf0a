"""What a template takes, and how a chat is given to it."""

import pytest

from chats import CHATML, FORGETS_THOUGHTS, words
from offbeat.data.forms import Form, find_form, nested

TOOL = {"name": "f", "description": "Says.", "parameters": {"type": "object"}}
CALLS = CHATML.replace("message['content'] +", "message['content'] + (message.tool_calls | tojson if message.tool_calls else '') +")


@pytest.mark.parametrize(("template", "form"), [
    (CHATML, Form(writes_calls=False, reasoning="")),
    (FORGETS_THOUGHTS, Form(writes_calls=False, reasoning="")),
    (CALLS, Form(reasoning="")),
    (CALLS.replace("message['content'] +", "message['content'] + (message.reasoning_content or '') +"), Form()),
    ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CALLS, Form(folds_system=True, reasoning="")),
    ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
     Form(parts=frozenset(("user", "assistant", "system")), writes_calls=False, reasoning="")),
])
def test_a_template_is_asked_what_it_takes(template: str, form: Form) -> None:
    assert words(template).form() == form


def test_a_template_that_refuses_everything_is_given_chats_as_they_are() -> None:
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert find_form(lambda messages, tools: None, with_tools=False).write(chat, ()) == (chat, [])


def test_tools_have_to_be_shown_too_where_there_are_some() -> None:
    assert not words(CALLS).form(with_tools=True).writes_calls
    assert words("{{ tools | tojson }}" + CALLS).form(with_tools=True).writes_calls
    flat = words("{% for tool in tools %}{{ tool['name'] }}{% endfor %}" + CALLS).form(with_tools=True)
    assert flat.flat_tools and flat.write([], [nested(TOOL)]) == ([], [TOOL])


def test_tools_are_given_with_a_function_around_them() -> None:
    assert nested(TOOL) == nested(nested(TOOL)) == {"type": "function", "function": TOOL}
    assert Form().write([], [TOOL])[1] == [nested(TOOL)]
