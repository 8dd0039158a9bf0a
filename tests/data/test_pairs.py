"""Preferences: every layout becomes the same tokens, masks cover the answers alone, and bad records are refused by their line."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chats import CHATML, FORGETS_THOUGHTS, words
from image_models import file_of, make_folder, picture
from offbeat.config.data import DataConfig
from offbeat.data.dataset import ListDataset
from offbeat.data.image_store import FIRST_ID
from offbeat.data.pairs import EncodedPair, PairEncoder, Preference, open_pairs, parse_preference
from offbeat.data.stream import PromptStream
from offbeat.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from offbeat.errors import DataError, ModelError
from shared_image_reader import reader_in_process

TOKENIZER = character_tokenizer()
USER, RIGHT, WRONG = ({"role": role, "content": text} for role, text in (("user", "7+5"), ("assistant", "12"), ("assistant", "130")))
PLAIN = {"prompt": "7+5=", "chosen": "12", "rejected": "130"}


def encoder(tokenizer: Tokenizer = TOKENIZER, data: DataConfig | None = None, *, too_long: str = "refuse", context: int = 200,
            max_row_tokens: int = 200, share_prefix: bool = True) -> PairEncoder:
    return PairEncoder(tokenizer, data or DataConfig(), too_long, context, max_row_tokens, share_prefix)  # type: ignore[arg-type]


def write(path: Path, *records: object) -> DataConfig:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(path=str(path), heldout_size=0)


def encoded(record: dict, tokenizer: Tokenizer = TOKENIZER, **data: object) -> EncodedPair:
    config = DataConfig(**data)  # type: ignore[arg-type]
    pair = encoder(tokenizer, config).encode(parse_preference(record, config, where="here"), name="row 0")
    assert pair is not None
    return pair


def answers(pair: EncodedPair, tokenizer: Tokenizer = TOKENIZER) -> list[tuple[str, str]]:
    """The text that is given and the text that is trained on, of each sequence."""
    return [
        (tokenizer.decode(tokens[~mask], skip_special_tokens=False), tokenizer.decode(tokens[mask], skip_special_tokens=False))
        for tokens, mask in pair.sequences]


def test_texts_are_the_prompt_then_each_answer_with_its_end_token() -> None:
    pair = encoded(PLAIN | {"margin": 2})
    assert answers(pair) == [("7+5=", "12<eos>"), ("7+5=", "130<eos>")]
    assert (pair.liked, pair.margin, pair.prefix_len) == ((True, False), 2.0, 4)
    for tokens, mask in pair.sequences:
        assert tokens.dtype == np.int32 and mask.dtype == np.bool_ and tokens.shape == mask.shape


@pytest.mark.parametrize("record", [
    {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
    {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
    {"prompt": "something else", "chosen": [USER, RIGHT], "rejected": [USER, WRONG], "score_chosen": 8.5},
    {"prompt": "7+5", "chosen": [RIGHT], "rejected": [WRONG]},
    {"prompt": [USER], "chosen": "12", "rejected": "130"},
])
def test_every_layout_of_a_chat_has_the_same_tokens(record: dict) -> None:
    tokenizer = words(CHATML)
    pair = encoded(record, tokenizer)
    given = "<|im_start|>user\n7+5<|im_end|>\n<|im_start|>assistant\n"
    assert answers(pair, tokenizer) == [(given, "12<|im_end|>"), (given, "130<|im_end|>")]
    assert pair.prefix_len == int((~pair.sequences[0][1]).sum())


def test_the_template_wraps_texts_where_that_is_asked_for() -> None:
    pair = encoded({**PLAIN, "prompt": "7"}, chat_template=True, system_prompt="add")
    assert answers(pair)[0] == ("system: add\nuser: 7\nassistant: ", "12<eos>")


def test_equal_answers_and_answers_of_several_messages_are_encoded() -> None:
    again = {"role": "user", "content": "so?"}
    pair = encoded({"chosen": [USER, RIGHT, again, RIGHT], "rejected": [USER, WRONG, again, RIGHT]})
    assert [trained for _, trained in answers(pair)] == ["12<eos>12<eos>", "130<eos>12<eos>"]
    assert pair.prefix_len == len(TOKENIZER.encode("user: 7+5\nassistant: "))
    assert [trained for _, trained in answers(encoded({"chosen": [USER, RIGHT], "rejected": [USER, RIGHT]}))] == ["12<eos>"] * 2
    tokenizer = words(FORGETS_THOUGHTS)
    with pytest.raises(DataError, match="row 0 has an answer of several messages, and the chat template writes earlier ones differently"):
        thinks = {"role": "assistant", "content": "7+5=12"}
        encoded({"prompt": [USER], "chosen": [thinks, again, RIGHT], "rejected": [RIGHT]}, tokenizer)


def test_labelled_answers_are_read_where_they_are_allowed(tmp_path: Path) -> None:
    config = write(tmp_path / "k.jsonl", {"prompt": "7+5=", "completion": "12", "label": True}, PLAIN, {
        "completion": [USER, WRONG], "label": 0})
    train, heldout = open_pairs(config, unpaired=True)
    assert [train.row(i).liked for i in range(3)] == [(True,), (True, False), (False,)] and heldout.num_rows == 0
    assert train.row(2) == Preference((USER,), ((WRONG,),), (False,))
    assert encoded({"prompt": "7+5=", "completion": "12", "label": True}).prefix_len == 0
    with pytest.raises(DataError, match=r"line 1, has one answer with a label, and pairs are needed.*only preference.loss = 'kto'"):
        open_pairs(config)


def test_held_out_pairs_come_from_the_end_and_the_digest_follows_the_rows(tmp_path: Path) -> None:
    records = [{**PLAIN, "prompt": f"{i}="} for i in range(5)]
    config = write(tmp_path / "p.jsonl", *records).model_copy(update={"heldout_size": 2})
    train, heldout = open_pairs(config)
    assert [train.row(i).prompt for i in range(3)] == ["0=", "1=", "2="] and [heldout.row(i).prompt for i in range(2)] == ["3=", "4="]
    before = train.digest
    write(tmp_path / "p.jsonl", *records[:-1], {**records[-1], "margin": 1})
    assert open_pairs(config)[0].digest != before


def test_parquet_has_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist([{"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}])
    parquet.write_table(table, tmp_path / "p.parquet")
    train, _ = open_pairs(DataConfig(path=str(tmp_path / "p.parquet"), heldout_size=0))
    assert train.row(0) == parse_preference({"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, DataConfig(), where="here")


@pytest.mark.parametrize(("record", "sentence"), [
    ({"prompt": "7"}, "must have the fields 'chosen' and 'rejected', or 'completion' and 'label'; it has prompt"),
    ({"prompt": "7", "chosen": "1"}, "must have the fields 'chosen' and 'rejected'"),
    ({"chosen": "1", "rejected": "2"}, "has no field 'prompt'; it has chosen, rejected; set data.prompt_field"),
    ({"prompt": "7", "chosen": None, "rejected": "2"}, "field 'chosen' must be text or a list of messages, got null"),
    ({"prompt": "7", "chosen": "1", "rejected": [WRONG]}, "must both be text or both be chats, got one of each"),
    ({"prompt": "7", "chosen": [], "rejected": [WRONG]}, "field 'chosen' must be a list of messages, got an empty list"),
    ({"prompt": 7, "chosen": "1", "rejected": "2"}, "field 'prompt' must be a list of messages, got int"),
    ({"chosen": [RIGHT], "rejected": [WRONG]}, "must begin with the same messages, which are the prompt"),
    ({"chosen": [USER, USER], "rejected": [USER, WRONG]}, "'chosen' must end with the assistant's message, got one of 'user'"),
    ({**PLAIN, "margin": "much"}, "field 'margin' must be a finite number, got 'much'"),
    ({"prompt": "7", "completion": "1", "label": "good"}, "field 'label' must be true or false, got 'good'"),
])
def test_a_bad_record_is_refused_by_its_line(record: dict, sentence: str, tmp_path: Path) -> None:
    config = write(tmp_path / "p.jsonl", PLAIN, record)
    with pytest.raises(DataError) as refused:
        open_pairs(config, unpaired=True)
    assert "p.jsonl', line 2" in str(refused.value) and sentence in str(refused.value)


@pytest.mark.parametrize(("config", "sentence"), [
    (DataConfig(task="sort_digits"), "data.task = 'sort_digits' makes prompts without preferences"),
    (DataConfig(), "data.path is empty; name a data file or folder, or a hub id, with chosen and rejected answers"),
])
def test_data_without_preferences_is_refused(config: DataConfig, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        open_pairs(config)


@pytest.mark.parametrize(("preference", "error", "sentence"), [
    (Preference("", ("1", "2"), (True, False)), DataError, "the prompt of row 0 has no tokens"),
    (Preference("1", ("1", ""), (True, False)), DataError, "an answer of row 0 has no tokens"),
    (Preference((USER,), ((RIGHT,), ({"role": "assistant", "content": " "},)), (True, False)), DataError, "row 0 cannot be .*empty"),
])
def test_a_row_without_tokens_is_named(preference: Preference, error: type, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        encoder().check(ListDataset((preference,)))


def test_a_chat_without_a_template_is_refused() -> None:
    with pytest.raises(ModelError, match="row 0 cannot be encoded: .*has no chat template"):
        encoder(character_tokenizer(chat_template=None)).check(ListDataset((Preference((USER,), ("1", "2"), (True, False)),)))


def test_pairs_that_are_too_long_are_refused_or_dropped_and_both_answers_count() -> None:
    pair = Preference("1234", ("12", "345"), (True, False))  # 7 and 8 tokens; 4 + 2 + 3 in a row with a shared prompt
    short = Preference("1", ("1", "2"), (True, False))
    assert encoder(max_row_tokens=9).check(ListDataset((pair,))) == 0
    with pytest.raises(DataError, match="row 0 needs a forward pass of 9 tokens for all of its answers, allowed are train.max_tokens"):
        encoder(max_row_tokens=8).check(ListDataset((pair,)))
    with pytest.raises(DataError, match="row 0 needs a forward pass of 13 tokens"):
        encoder(max_row_tokens=12, share_prefix=False).check(ListDataset((pair,)))
    with pytest.raises(DataError, match="row 1 has 8 tokens in its longest answer with the prompt, allowed are 7, the model's context"):
        encoder(context=7).check(ListDataset((short, pair)))
    dropping = encoder(context=7, too_long="drop")
    dataset = ListDataset((short, pair, short))
    assert dropping.check(dataset) == 1
    drawn = dropping.draw(PromptStream(dataset, seed=0, shuffle=False), 3)
    assert [index for index, _ in drawn] == [0, 2, 0]
    with pytest.raises(DataError, match="all 1 rows are too long"):
        dropping.check(ListDataset((pair,)))


@pytest.fixture(scope="module")
def sees(tmp_path_factory) -> Tokenizer:
    """The tokenizer of a model that reads images."""
    folder = make_folder(tmp_path_factory.mktemp("models") / "qwen2_5_vl", "qwen2_5_vl")
    return replace(load_tokenizer(folder), images=reader_in_process(folder, folder / "images"))


SHOWN = {"role": "user", "content": [{"type": "image", "image": file_of(picture())}, {"type": "text", "text": "7+5"}]}


OTHER = {"role": "user", "content": [{"type": "image", "image": file_of(picture(1))}, {"type": "text", "text": "7+5"}]}


@pytest.mark.parametrize("record", [
    {"prompt": [SHOWN], "chosen": [RIGHT], "rejected": [WRONG]},
    {"chosen": [SHOWN, RIGHT], "rejected": [SHOWN, WRONG]},
    {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG], "images": [file_of(picture())]},
    {"prompt": [{**USER, "content": [{"type": "image"}, {"type": "text", "text": "7+5"}]}], "chosen": "12", "rejected": "130",
     "images": [file_of(picture())]},
])
def test_a_prompt_has_its_images_before_both_answers(record: dict, sees: Tokenizer) -> None:
    pair = encoded(record, sees)
    [image] = {int(token) for tokens, _ in pair.sequences for token in tokens[tokens >= FIRST_ID]}
    label = sees.images.store.get(image).label
    prompt = f"user: {label}7+5\nassistant: "
    assert answers(pair, sees) == [(prompt, "12<eos>"), (prompt, "130<eos>")]
    assert pair.prefix_len == len(pair.sequences[0][0]) - 3
    plain = encoded({"prompt": f"<image>{USER['content']}=", "chosen": "12", "rejected": "1", "images": [file_of(picture())]}, sees)
    assert answers(plain, sees)[0] == (f"{label}7+5=", "12<eos>")


@pytest.mark.parametrize(("record", "message"), [
    ({"prompt": [USER], "chosen": [SHOWN, RIGHT], "rejected": [USER, WRONG]}, "begin with the same messages"),
    ({"chosen": [SHOWN, RIGHT], "rejected": [OTHER, WRONG]}, "must have the same images"),
    ({"prompt": [USER], "chosen": [RIGHT, SHOWN, RIGHT], "rejected": [WRONG]}, "must have the same images"),
    ({"prompt": [USER], "chosen": [{**RIGHT, "content": SHOWN["content"]}], "rejected": [WRONG]}, "not read there"),
    ({"prompt": "<image><image>", "chosen": "a", "rejected": "b", "images": [b"\x89PNG"]}, "2 places for images and 1 images")])
def test_images_of_answers_are_refused(record: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_preference(record, DataConfig(), where="here")


def test_pairs_with_images_are_refused_where_the_model_reads_none() -> None:
    with pytest.raises(DataError, match="1 images, which are not read for"):
        encoded({"prompt": [SHOWN], "chosen": "12", "rejected": "130"})
