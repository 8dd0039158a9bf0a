"""Images as rows write them: every form, places and numbers, and what is refused."""

import base64
import json

import numpy as np
import pytest

from image_models import file_of, picture
from offbeat.api.rows import write_rows
from offbeat.config.data import DataConfig
from offbeat.data.image_decode import decode_image
from offbeat.data.image_sources import MARK, ImageLimits, ImageSource
from offbeat.data.messages import parse_messages
from offbeat.data.row import parse_record
from offbeat.errors import DataError

PNG = file_of(picture())
URI = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
TEXT = {"type": "text", "text": "how many?"}


def parse(record, where="'f.jsonl', line 3"):
    return parse_record(record, DataConfig(), where=where)


def chat(*parts, **columns):
    return {"messages": [{"role": "user", "content": [*parts, TEXT]}, {"role": "assistant", "content": "3"}], **columns}


@pytest.mark.parametrize("part", [
    {"type": "image_url", "image_url": {"url": URI}}, {"type": "image_url", "image_url": URI}, {"type": "input_image", "image_url": URI},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}},
    {"type": "image", "image": URI}, {"type": "image", "image": {"bytes": PNG, "path": None}},
    {"type": "image", "base64": base64.b64encode(PNG).decode()}])
def test_each_format_of_a_message_s_image_is_read(part):
    row = parse(chat(part))
    assert row.prompt[0]["content"] == f"{MARK}how many?"
    assert row.images == (ImageSource(data=PNG),)


@pytest.mark.parametrize("value", [URI, PNG, {"bytes": PNG, "path": None}, {"bytes": PNG, "path": "a.png"}])
def test_each_form_in_a_column_is_read(value):
    row = parse({"prompt": "how many?", "answer": "3", "images": [value]})
    assert (row.prompt, row.images, row.extra) == (f"{MARK}how many?", (ImageSource(data=PNG),), {})


def test_a_path_is_relative_to_the_data_file(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    row = parse({"prompt": "?", "answer": "3", "image": "pictures/a.png"}, where=f"{str(tmp_path / 'rows.jsonl')!r}, line 1")
    assert row.images == (ImageSource(path=str(tmp_path / "pictures/a.png")),)


def test_places_in_messages_take_the_column_s_images_in_order():
    row = parse(chat({"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, images=["a.png", "b.png"]))
    assert row.prompt[0]["content"] == f"{MARK}and{MARK}how many?"
    assert [image.path for image in row.images] == ["a.png", "b.png"]


def test_a_text_writes_places_of_images_as_a_word():
    row = parse({"prompt": "first <image>, then <image>", "answer": "3", "images": ["a.png", "b.png"]})
    assert row.prompt == f"first {MARK}, then {MARK}"
    assert row.prompt_text == "first <image>, then <image>"


def test_a_column_called_image_of_other_things_stays_a_column():
    row = parse({"prompt": "?", "answer": "3", "image": "https://example.org/a.png"})
    assert not row.images
    assert row.extra["image"] == "https://example.org/a.png"


@pytest.mark.parametrize(("record", "said"), [
    (chat({"type": "image"}, images=["a.png", "b.png"]), "has 1 places for images and 2 images"),
    (chat({"type": "image"}), "has 1 places for images and 0 images"),
    ({"prompt": "<image> <image>", "answer": "3", "images": ["a.png"]}, "has 2 places for images and 1 images"),
    (chat({"type": "image", "image": URI}, images=["a.png"]), "no message has a place for"),
    (chat({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}), "nothing is fetched"),
    ({"prompt": "?", "answer": "3", "images": ["ftp://example.org/a.png"]}, "nothing is fetched"),
    ({"prompt": "?", "answer": "3", "images": ["data:image/png;base64,@@@"]}, "is not in base64"),
    ({"prompt": "?", "answer": "3", "images": ["data:nothing"]}, "is no data URI"),
    ({"prompt": "?", "answer": "3", "images": [7]}, "must be a path, a data URI or the bytes of a file"),
    ({"prompt": f"{MARK}?", "answer": "3", "images": ["a.png"]}, "U\\+FFFC"),
    ({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": [{"type": "image", "image": URI}]}]},
     "the assistant's message"),
])
def test_what_cannot_be_meant_is_refused_with_the_row(record, said):
    with pytest.raises(DataError, match=said) as raised:
        parse(record)
    assert str(raised.value).startswith("'f.jsonl', line 3")


def test_messages_refuse_images_where_none_are_read():
    with pytest.raises(DataError, match="a message in 'chosen' has an image"):
        parse_messages([{"role": "user", "content": [{"type": "image", "image": URI}]}], "chosen", "row 1")


def test_rows_in_memory_keep_pixels(tmp_path):
    pixels = np.asarray(picture(3))
    rows = [{"prompt": "?", "answer": "3", "images": [image]} for image in (picture(3), pixels, PNG)]
    path = write_rows(rows, tmp_path, argument="data").path
    found = [parse_record(json.loads(line), DataConfig(), where="row") for line in path.read_text().splitlines()]
    again = write_rows(found, tmp_path, argument="data").path
    for row, expected in zip(found, (pixels, pixels, np.asarray(picture(0))), strict=True):
        assert np.array_equal(np.asarray(decode_image(row.images[0].data, ImageLimits())), expected)
    assert [parse_record(json.loads(line), DataConfig(), where="row") for line in again.read_text().splitlines()] == found
