"""Marks of images become parts for templates, and token ids of images are labels."""

from offbeat.data.image_placeholders import label_of, split_images, with_parts
from offbeat.data.image_sources import MARK
from offbeat.data.image_store import FIRST_ID

IMAGE = {"type": "image"}


def test_marks_in_a_text_or_in_parts_become_parts_and_all_else_stays() -> None:
    messages = [
        {"role": "user", "content": f"{MARK}how many?"}, {"role": "user", "content": "none"}, {"role": "assistant", "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": f"a{MARK}b", "cached": True}, {"type": "audio"}]}]
    assert [message.get("content") for message in with_parts(messages)] == [
        [IMAGE, {"type": "text", "text": "how many?"}], "none", None,
        [{"type": "text", "text": "a", "cached": True}, IMAGE, {"type": "text", "text": "b", "cached": True}, {"type": "audio"}]]


def test_token_ids_are_split_into_text_and_images() -> None:
    ids = [5, 6, FIRST_ID, FIRST_ID, FIRST_ID + 1, 7]
    assert list(split_images(ids)) == [(0, [5, 6]), (FIRST_ID, [FIRST_ID] * 2), (FIRST_ID + 1, [FIRST_ID + 1]), (0, [7])]


def test_an_image_that_is_not_stored_is_shown_by_its_id() -> None:
    assert label_of(FIRST_ID, None) == f"<image {FIRST_ID}>"
