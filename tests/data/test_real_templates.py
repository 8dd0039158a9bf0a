"""A sample of what `make test-templates` tries: real chat templates, random chats, and tokenizers of two kinds."""

from template_corpus import templates, try_template


def test_a_chat_under_a_real_template_is_trained_on_as_it_is_generated_or_refused() -> None:
    found = [each for path in templates()[7::90] for each in try_template(path, chats=4)]
    assert not [each for each in found if each[0] == "wrong"]
    assert sum(what == "right" for what, *_ in found) > len(found) / 2
