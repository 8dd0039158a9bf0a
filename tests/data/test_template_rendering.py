"""Chat templates are rendered with their variables, and say which they read; whole tokenizers are in test_tokenizer.py."""

import pytest

from offbeat.data.template_rendering import check_template, render_marked, render_template, variables_read
from offbeat.errors import ModelError

TEMPLATE = (
    "{% for m in messages %}{{ who }}:{% generation %}{{ m['content'] }}{% endgeneration %};{% endfor %}"
    "{% if add_generation_prompt %}?{% endif %}")
CHAT = [{"role": "assistant", "content": "hi"}]


def test_a_chat_is_rendered_with_variables_and_the_text_before_an_answer() -> None:
    assert render_template(TEMPLATE, {"who": "me"}, CHAT, (), to_answer=True) == "me:hi;?"
    assert render_marked(TEMPLATE, {"who": "me"}, CHAT, ()) == ("me:hi;", [(3, 5)])


def test_a_template_says_what_it_reads_and_a_broken_one_is_refused() -> None:
    assert variables_read(TEMPLATE) == {"messages", "who", "add_generation_prompt"}
    assert variables_read("{% if") == frozenset()
    with pytest.raises(ModelError, match=r"the chat template of data.chat_template is no Jinja template: .*; mend it"):
        check_template("{% if")
