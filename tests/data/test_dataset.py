"""Opening datasets, drawing prompts that resume exactly, rendering them, and checking their lengths."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from chats import words_with_tools
from offbeat.config.data import DataConfig
from offbeat.data.dataset import (
    ListDataset,
    PromptStream,
    StreamState,
    check_length,
    check_lengths,
    open_datasets,
    render,
    sft_sequence,
)
from offbeat.data.row import Row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.wire import decode_json, encode_json
from offbeat.errors import DataError, ModelError

TOKENIZER = character_tokenizer()


def rows(count):
    return ListDataset(tuple(Row(f"{i}>", str(i)) for i in range(count)))


def write(path, count, *, prefix=""):
    path.write_text("".join(json.dumps({"prompt": f"{prefix}{i}", "answer": str(i)}) + "\n" for i in range(count)))
    return str(path)


def prompts(dataset, count=None):
    return [dataset.row(i).prompt for i in range(dataset.num_rows if count is None else count)]


# Opening


def test_held_out_rows_come_from_the_end_and_are_not_trained_on(tmp_path):
    config = DataConfig(path=write(tmp_path / "d.jsonl", 10), heldout_size=3)
    train, heldout = open_datasets(config, seed=0)
    assert prompts(train) == [str(i) for i in range(7)]
    assert prompts(heldout) == ["7", "8", "9"]
    with pytest.raises(IndexError):
        train.row(7)


def test_held_out_rows_can_come_from_a_file_or_not_at_all(tmp_path):
    path, other = write(tmp_path / "d.jsonl", 4), write(tmp_path / "h.jsonl", 5, prefix="h")
    train, heldout = open_datasets(DataConfig(path=path, heldout_path=other, heldout_size=2), seed=0)
    assert (train.num_rows, prompts(heldout)) == (4, ["h0", "h1"])
    train, heldout = open_datasets(DataConfig(path=path, heldout_path=other, heldout_size=99), seed=0)
    assert heldout.num_rows == 5
    train, heldout = open_datasets(DataConfig(path=path, heldout_size=0), seed=0)
    assert (train.num_rows, heldout.num_rows) == (4, 0)


@pytest.mark.parametrize("task", ["sort_digits", "addition"])
def test_no_generated_prompt_is_both_trained_on_and_held_out(task):
    # 100 different prompts of which 40 are held out, so that nearly half of all draws must be refused.
    train, heldout = open_datasets(DataConfig(task=task, task_size=2 if task == "sort_digits" else 1, heldout_size=40), seed=5)
    held = set(prompts(heldout))
    trained = set(prompts(train, 1000))
    assert len(held) == 40
    assert len(trained) == 60
    assert not held & trained
    assert train.num_rows is None


def test_generated_datasets_depend_on_the_seed_alone():
    config = DataConfig(task="countdown", task_size=4, heldout_size=8)
    (train, heldout), (again, held_again) = open_datasets(config, seed=1), open_datasets(config, seed=1)
    other, _ = open_datasets(config, seed=2)
    assert prompts(train, 20) == prompts(again, 20) != prompts(other, 20)
    assert prompts(heldout) == prompts(held_again)


@pytest.mark.parametrize(("size", "heldout_size"), [(1, 256), (1, 10)])
def test_a_task_too_small_to_hold_out_says_so(size, heldout_size):
    with pytest.raises(DataError, match="has too few different prompts .* raise data.task_size or lower data.heldout_size"):
        open_datasets(DataConfig(task="sort_digits", task_size=size, heldout_size=heldout_size), seed=0)


def test_rows_that_cannot_be_used_are_left_out_with_their_reasons(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n{"prompt": "c", "answer": "3"}\n{"prompt": "d", "answer": [4]}\n')
    refused = []
    train, heldout = open_datasets(DataConfig(path=str(path), max_unusable_rows=2, heldout_size=1), seed=0, refused=refused)
    assert (prompts(train), prompts(heldout)) == (["a"], ["c"])
    assert heldout.where(0) == f"{str(path)!r}, line 3"
    assert [reason.removeprefix(f"{str(path)!r}, ").partition(";")[0] for reason in refused] == [
        "line 2, has no field 'answer'", "line 4: field 'answer' must be text or a number, got list"]
    with pytest.raises(DataError, match="2 rows cannot be used, allowed are data.max_unusable_rows = 1"):
        open_datasets(DataConfig(path=str(path), max_unusable_rows=1), seed=0)
    train, _ = open_datasets(DataConfig(path=str(path), max_unusable_rows=1, heldout_size=0), seed=0, needs_answer=False)
    assert prompts(train) == ["a", "b", "c"]


def test_a_quick_look_opens_the_first_rows_alone(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n' * 5 + "no JSON\n")
    train, heldout = open_datasets(DataConfig(path=str(path), heldout_size=100), seed=0, limit=5)
    assert (train.num_rows, heldout.num_rows) == (5, 0)
    with pytest.raises(DataError, match="line 6, is not JSON"):
        open_datasets(DataConfig(path=str(path), heldout_size=100), seed=0, limit=6)


def test_settings_that_cannot_be_opened_say_what_to_change(tmp_path):
    path = write(tmp_path / "d.jsonl", 3)
    for config, sentence in [
        (DataConfig(), "data.task and data.path are both empty"),
        (DataConfig(path=path, heldout_size=3), "has 3 rows, which leaves none to train on after data.heldout_size = 3"),
        (DataConfig(path=path, heldout_split="test"), "data.heldout_split is for hub ids and folders, but"),
        (DataConfig(path=path, answer_field="label"), r"d.jsonl', line 1, has no field 'label'; it has prompt, answer"),
    ]:
        with pytest.raises(DataError, match=sentence):
            open_datasets(config, seed=0)


# Drawing


def test_each_epoch_visits_every_row_once_in_another_order():
    stream = PromptStream(rows(50), seed=0)
    epochs = [[stream.next()[0] for _ in range(50)] for _ in range(2)]
    for epoch, ids in enumerate(epochs):
        assert sorted(ids) == sorted(f"{epoch}:{i}" for i in range(50))
    orders = [[prompt_id.partition(":")[2] for prompt_id in ids] for ids in epochs]
    assert orders[0] != orders[1]


def test_an_id_names_the_row_it_comes_with_and_unshuffled_rows_come_in_order():
    stream = PromptStream(rows(3), seed=0, shuffle=False)
    drawn = [stream.next() for _ in range(4)]
    assert [(prompt_id, row.answer) for prompt_id, row in drawn] == [("0:0", "0"), ("0:1", "1"), ("0:2", "2"), ("1:0", "0")]
    assert stream.row("7:2") == drawn[2][1]


def test_generated_rows_are_drawn_by_index_without_an_epochs_end():
    train, _ = open_datasets(DataConfig(task="sort_digits", heldout_size=4), seed=0)
    stream = PromptStream(train, seed=0)
    assert [stream.next()[0] for _ in range(3)] == ["0:0", "0:1", "0:2"]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.booleans(), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40))
def test_a_restored_stream_goes_on_exactly_and_loses_nothing(num_rows, shuffle, events, stop):
    """Random draws (0, 1, 2) and give-backs (3), interrupted anywhere: the interrupted stream draws what the other one draws."""

    def play(stream, held, events):
        drawn = []
        for event in events:
            if event == 3 and held:
                stream.give_back(held.pop(0))
            else:
                drawn.append(stream.next())
                held.append(drawn[-1][0])
        return drawn

    straight, held = PromptStream(rows(num_rows), seed=9, shuffle=shuffle), []
    expected = play(straight, held, events)
    first, held_first = PromptStream(rows(num_rows), seed=9, shuffle=shuffle), []
    before = play(first, held_first, events[:stop])
    state = decode_json(StreamState, encode_json(first.state()))
    second = PromptStream(rows(num_rows), seed=9, shuffle=shuffle)
    second.restore(state)
    assert before + play(second, held_first, events[stop:]) == expected
    assert second.state() == straight.state()
    # Everything drawn is held by the caller or waits to come again, once each.
    known = [*held, *straight.state().returned]
    assert len(known) == len(set(known)) == straight.state().epoch * num_rows + straight.state().position


def test_what_is_given_back_comes_first_in_the_order_it_came():
    stream = PromptStream(rows(10), seed=0)
    drawn = [stream.next() for _ in range(5)]
    stream.give_back(drawn[3][0])
    stream.give_back(drawn[1][0])
    assert stream.state().returned == (drawn[3][0], drawn[1][0])
    assert [stream.next(), stream.next()] == [drawn[3], drawn[1]]
    assert stream.next()[0] not in [prompt_id for prompt_id, _ in drawn]


def test_a_changed_dataset_or_a_strange_id_is_refused():
    stream = PromptStream(rows(4), seed=0)
    with pytest.raises(DataError, match="the saved run had drawn 5 prompts of this epoch, but the dataset has 4 rows"):
        stream.restore(StreamState(0, 5))
    for prompt_id in ("0:4", "zero", "1:"):
        with pytest.raises(DataError, match=f"'epoch:index' within a dataset of 4 rows, got '{prompt_id}'"):
            stream.give_back(prompt_id)


# Rendering


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
