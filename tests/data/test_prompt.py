"""Rendering prompts, and checking their lengths."""

from dataclasses import replace

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from chats import words_with_tools
from offbeat.config.data import DataConfig
from offbeat.data.dataset import ListDataset, open_datasets
from offbeat.data.prompt import check_length, check_lengths, render, sft_sequence
from offbeat.data.row import Row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.errors import DataError, ModelError

TOKENIZER = character_tokenizer()


def test_plain_prompts_are_encoded_as_they_are():
    assert TOKENIZER.decode(render(Row("31>", "13"), TOKENIZER, DataConfig())) == "31>"


def test_chats_take_the_template_and_the_system_prompt():
    config = DataConfig(chat_template=True, system_prompt="sort")
    assert TOKENIZER.decode(render(Row("31", "13"), TOKENIZER, config)) == "system: sort\nuser: 31\nassistant: "
    chat = Row(({"role": "user", "content": "hi"},), "")
    assert TOKENIZER.decode(render(chat, TOKENIZER, DataConfig())) == "user: hi\nassistant: "
    asked = DataConfig(system_prompt="be brief")
    assert TOKENIZER.decode(render(chat, TOKENIZER, asked)) == "system: be brief\nuser: hi\nassistant: "
    own = Row(({"role": "system", "content": "own"}, *chat.prompt), "")
    assert TOKENIZER.decode(render(own, TOKENIZER, asked)) == "system: own\nuser: hi\nassistant: "
    with pytest.raises(ModelError, match="has no chat template"):
        render(chat, character_tokenizer(chat_template=None), DataConfig())


def test_the_template_sees_a_rows_tools_and_the_variables_of_the_settings():
    row = Row(({"role": "user", "content": "hi"},), "", tools=({"name": "add"}, {"name": "sub"}))
    tokenizer = words_with_tools()
    ends = {True: "<|im_start|>assistant\n", False: "<|im_start|>assistant\n<quiet>"}
    for thinks, end in ends.items():
        prompt = render(row, replace(tokenizer, template_kwargs={"thinks": thinks}), DataConfig())
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        assert text == f"<|im_start|>tools\naddsub<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n{end}"


def test_fine_tuning_learns_the_answer_and_the_end_token():
    tokens, mask = sft_sequence(Row("31>", "13"), TOKENIZER, DataConfig())
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == "31>13<eos>"
    assert mask.tolist() == [False] * 3 + [True] * 3
    assert (tokens.dtype, mask.dtype) == (np.int32, np.bool_)
    tokens, mask = sft_sequence(Row("q", "7", solution="3+4=7"), TOKENIZER, DataConfig())
    assert TOKENIZER.decode(tokens[mask]) == "3+4=7"


def test_plain_prompts_begin_as_the_tokenizer_begins_a_text_in_training_too():
    tokenizer = character_tokenizer()
    tokenizer.hf.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.hf.bos_token_id
    tokenizer.hf.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert render(Row("31>", "13"), tokenizer, DataConfig())[:2] == [bos, 6]
    assert render(Row("31", "13"), tokenizer, DataConfig(chat_template=True)).count(bos) == 0, "the template writes none"
    tokens, mask = sft_sequence(Row("31>", "13"), tokenizer, DataConfig())
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "<s>31>13<eos>"
    assert mask.tolist() == [False] * 4 + [True] * 3


def test_an_answer_in_a_chat_ends_with_the_end_of_turn_of_the_template():
    template = "{% for message in messages %}{{ message['content'] }}<end_of_turn>\n{% endfor %}"
    tokenizer = character_tokenizer(chat_template=template)
    tokenizer.hf.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    for row, config, end in [
        (Row("31", "13"), DataConfig(chat_template=True), "<end_of_turn>"), (Row("31", "13"), DataConfig(), "<eos>"),
        (Row(({"role": "user", "content": "31"},), "13"), DataConfig(), "<end_of_turn>"),
    ]:
        tokens, mask = sft_sequence(row, tokenizer, config)
        assert tokenizer.decode(tokens[mask], skip_special_tokens=False) == f"13{end}"


def test_the_longest_prompt_is_measured_and_one_that_is_too_long_is_named():
    dataset = ListDataset((Row("12", ""), Row("1234", ""), Row("1", "")))
    assert check_lengths(dataset, TOKENIZER, DataConfig(), context=10, max_new_tokens=6) == 4
    with pytest.raises(DataError, match=r"of row 1 has 4 tokens, allowed are 3 \(a context of 10 less rollout.max_new_tokens = 7\); lower"):
        check_lengths(dataset, TOKENIZER, DataConfig(), context=10, max_new_tokens=7)
    with pytest.raises(DataError, match=r"of row 1 has 4 tokens, allowed are data.max_prompt_tokens = 3; raise it, or remove the row"):
        check_lengths(dataset, TOKENIZER, DataConfig(max_prompt_tokens=3), context=10, max_new_tokens=2)
    with pytest.raises(DataError, match="prompt 0:7 has no tokens"):
        check_length(0, DataConfig(), name="0:7", context=10, max_new_tokens=1)


def test_an_endless_dataset_is_checked_by_its_first_rows():
    train, _ = open_datasets(DataConfig(task="sort_digits", task_size=8, heldout_size=4), seed=0)
    assert check_lengths(train, TOKENIZER, DataConfig(), context=32, max_new_tokens=10, max_rows=20) == 9
