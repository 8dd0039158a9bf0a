"""All that ends a sample."""

import pytest

from offbeat.data.ends import MAX_ENDS, Ends, find_ends
from offbeat.data.tokenizer import character_tokenizer
from offbeat.errors import ConfigError

TEMPLATE = "{% for message in messages %}{{ message['content'] }}<end_of_turn>\n{% endfor %}"


def tokenizer():
    made = character_tokenizer(chat_template=TEMPLATE)
    made.hf.add_special_tokens({"additional_special_tokens": ["<end_of_turn>", "<call>"]})
    return made  # 0 to 53, then 54 and 55


def test_a_sample_ends_at_the_tokens_of_tokenizer_model_template_and_user_each_once():
    assert find_ends(character_tokenizer()) == Ends((0,))
    assert find_ends(tokenizer()) == Ends((0, 54))
    assert find_ends(tokenizer(), model_end_ids=(30, 0, 54), stop_token_ids=(7, 30)) == Ends((0, 30, 54, 7))


def test_a_stop_string_that_is_a_special_token_becomes_its_id_and_text_stays_text():
    assert find_ends(tokenizer(), stop=("<call>", "12", "<end_of_turn>")) == Ends((0, 54, 55), ("12",))


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"stop_token_ids": (56,)}, "rollout.stop_token_ids must hold tokens of 'characters', 0 to 55, got 56"),
    ({"stop_token_ids": (-1,)}, "got -1"),
    ({"stop": ("<call>\n",)}, r"rollout.stop holds '<call>\\n', which can never match: '<call>' is a special token of 'characters'"),
    ({"model_end_ids": range(MAX_ENDS + 1)}, f"at most {MAX_ENDS} tokens can end a sample, got 65"),
    ({"stop": [f"{i}" for i in range(MAX_ENDS + 1)]}, f"at most {MAX_ENDS} strings can end a sample, got 65"),
])
def test_what_can_never_end_a_sample_is_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        find_ends(tokenizer(), **settings)
